#include "ops/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

namespace cospec {

static constexpr int MAX_THREADS = 64;

// The state that the threads share. Data that different threads write is on different cache lines.
// A pool has a fixed size and is never destroyed, because workers may read it until the process ends.
struct ThreadPool {
    explicit ThreadPool(int threads)
        : size(threads) {}
    const int size;  // the caller included
    int started = 0;
    int caller_cpu = -1;
    std::atomic<int> ids[MAX_THREADS] = {};  // thread ids of the workers
    PoolTask work = nullptr;
    void* context = nullptr;
    int team = 1;  // threads of the current task
    bool stopping = false;
    pthread_mutex_t run_lock = PTHREAD_MUTEX_INITIALIZER;    // held during a task
    pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;  // guards `wake`
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    alignas(64) std::atomic<unsigned> epoch{0};
    alignas(64) std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int> busy{0};  // workers that have not ended the epoch
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> generation{0};
    struct alignas(64) Range {
        std::atomic<uint64_t> left{0};  // see `pack_range`
    } ranges[MAX_THREADS];              // of each thread's items
};

namespace {

constexpr int IDLE_SPINS = 5000;   // before a worker sleeps; some 150 microseconds
constexpr int TEAM_SPINS = 20000;  // before a thread that waits for its team yields

std::atomic<ThreadPool*> current{new ThreadPool(1)};

constexpr long RANGE_MASK = MOST_ITEMS - 1;

// The items [front, back) that are left of a range, and the loop that they belong to.
uint64_t pack_range(unsigned loop, long front, long back) {
    return (uint64_t)(uint16_t)loop << 48 | (uint64_t)front << 24 | (uint64_t)back;
}

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void wait_for_epoch(ThreadPool* p, unsigned seen) {
    for (int spins = 0; spins < IDLE_SPINS; spins++) {
        if (p->epoch.load(std::memory_order_acquire) != seen) return;
        cpu_pause();
    }
    pthread_mutex_lock(&p->sleep_lock);
    p->sleepers.fetch_add(
        1);  // before the last look at the epoch: `start_epoch` writes the epoch first, then reads this
    while (p->epoch.load() == seen) pthread_cond_wait(&p->wake, &p->sleep_lock);
    p->sleepers.fetch_sub(1);
    pthread_mutex_unlock(&p->sleep_lock);
}

void start_epoch(ThreadPool* p) {
    p->epoch.fetch_add(1);
    if (p->sleepers.load() == 0) return;
    pthread_mutex_lock(&p->sleep_lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->sleep_lock);
}

#if defined(__linux__)
// Keep the workers off the caller's processor. Under background load a scheduler may leave two spinning threads of a
// team on one processor. This costs a thousandfold.
void keep_workers_off_caller(ThreadPool* p) {
    static const cpu_set_t allowed_cpus = [] {
        cpu_set_t set;
        if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
        return set;
    }();
    const int cpu = sched_getcpu(), count = CPU_COUNT(&allowed_cpus);
    if (cpu == p->caller_cpu || cpu < 0 || count < 2 || count >= 2 * p->size) return;
    p->caller_cpu = cpu;
    cpu_set_t worker_cpus = allowed_cpus;
    CPU_CLR(cpu, &worker_cpus);
    for (int i = 1; i <= p->started; i++)
        if (const int id = p->ids[i].load())
            sched_setaffinity(id, sizeof worker_cpus, &worker_cpus);
        else
            p->caller_cpu = -1;  // not running yet: try again next time
}
int thread_id() { return (int)syscall(SYS_gettid); }
#else
void keep_workers_off_caller(ThreadPool*) {}
int thread_id() { return 1; }
#endif

struct WorkerStart {
    ThreadPool* pool;
    int id;
};

void* worker(void* argument) {
    const WorkerStart start = *static_cast<WorkerStart*>(argument);
    delete static_cast<WorkerStart*>(argument);
    ThreadPool* p = start.pool;
    p->ids[start.id].store(thread_id());
    for (unsigned seen = 0;; seen++) {
        wait_for_epoch(p, seen);
        if (p->stopping) return nullptr;
        if (start.id < p->team) p->work(p->context, Team{start.id, p->team, p});
        p->busy.fetch_sub(1, std::memory_order_release);
    }
}

// All workers start before the first epoch, so each counts epochs from 0.
void start_workers(ThreadPool* p) {
    if (p->started || p->epoch.load()) return;
    while (p->started < p->size - 1) {
        pthread_t thread;
        WorkerStart* start = new WorkerStart{p, p->started + 1};
        if (pthread_create(&thread, nullptr, worker, start) != 0) {
            delete start;
            break;
        }
        pthread_detach(thread);
        p->started++;
    }
}

// A forked child has no workers, and may have inherited a locked mutex.
void after_fork() { current.store(new ThreadPool(current.load()->size)); }

const int fork_handler = pthread_atfork(nullptr, nullptr, after_fork);

// Another thread may replace the pool while this thread waits for the lock; the workers of the old pool leave.
ThreadPool* lock_current() {
    for (;;) {
        ThreadPool* p = current.load();
        pthread_mutex_lock(&p->run_lock);
        if (!p->stopping) return p;
        pthread_mutex_unlock(&p->run_lock);
    }
}

}  // namespace

void Team::barrier() const {
    if (size == 1) return;
    const unsigned seen = pool->generation.load(std::memory_order_relaxed);
    if (pool->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
        pool->arrived.store(0, std::memory_order_relaxed);
        pool->generation.store(seen + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; pool->generation.load(std::memory_order_acquire) == seen; spins++)
        spins < TEAM_SPINS ? cpu_pause() : (void)sched_yield();
}

bool Team::take(long count, long least, long* from, long* to) const {
    for (int i = 0; i < size; i++) {
        const int owner = (id + i) % size;
        std::atomic<uint64_t>& range = pool->ranges[owner].left;
        for (uint64_t seen = range.load(std::memory_order_relaxed);;) {
            const int16_t later = (int16_t)((uint16_t)(seen >> 48) - (uint16_t)loops);
            if (later > 0) return false;  // a thread of a later loop has found all items of this loop taken
            long front = seen >> 24 & RANGE_MASK, back = seen & RANGE_MASK;
            if (later < 0) {  // no thread has taken items of the range in this loop
                front = count / least * owner / size * least;
                back = owner + 1 < size ? count / least * (owner + 1) / size * least : count;
            }
            const long left = back - front, halves = left / least / 2;
            if (left == 0) break;
            const long items = left < least ? left : least * (halves > 1 ? halves : 1);
            *from = i == 0 ? front : back - items;
            *to = *from + items;
            (i == 0 ? front : back) = i == 0 ? *to : *from;
            if (range.compare_exchange_weak(seen, pack_range(loops, front, back), std::memory_order_relaxed))
                return true;
        }
    }
    return false;
}

void thread_pool_run(PoolTask work, void* context, int threads) {
    if (threads <= 1 || num_threads() <= 1) return work(context, Team{0, 1, current.load()});
    ThreadPool* p = lock_current();
    if (threads > p->size) threads = p->size;
    start_workers(p);
    keep_workers_off_caller(p);
    p->work = work;
    p->context = context;
    p->team = threads <= p->started + 1 ? threads : p->started + 1;
    p->busy.store(p->started);
    for (int i = 0; i < p->team; i++) p->ranges[i].left.store(0, std::memory_order_relaxed);
    start_epoch(p);
    work(context, Team{0, p->team, p});
    for (int spins = 0; p->busy.load(std::memory_order_acquire); spins++)
        spins < TEAM_SPINS ? cpu_pause() : (void)sched_yield();
    pthread_mutex_unlock(&p->run_lock);
}

void set_num_threads(int threads) {
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    ThreadPool* old = lock_current();
    if (threads != old->size) {
        current.store(new ThreadPool(threads));
        old->stopping = true;
        start_epoch(old);
    }
    pthread_mutex_unlock(&old->run_lock);
}

int num_threads() { return current.load()->size; }

bool workers_awake() {
    const ThreadPool* p = current.load();
    return p->started > 0 && p->sleepers.load(std::memory_order_relaxed) == 0;
}

}  // namespace cospec
