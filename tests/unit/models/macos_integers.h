// The integers of macOS, put before a source: int64_t is `long long` there, while `long` has 64 bits on both systems.
#define int64_t linux_int64_t
#define uint64_t linux_uint64_t
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>
#undef int64_t
#undef uint64_t
typedef long long int64_t;
typedef unsigned long long uint64_t;
