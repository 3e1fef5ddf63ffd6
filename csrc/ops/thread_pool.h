// A few threads that run one task after the other.
//
// The library has its own pool because torch's OpenMP runtime cannot be shared without linking against torch's copy.
// Workers spin for a short while after a task and then sleep. So an idle process takes no processor time.
#pragma once

namespace cospec {

struct ThreadPool;

constexpr long MOST_ITEMS = 1 << 24;  // of a loop whose threads help each other

// What each thread of a task receives.
struct Team {
    Team(int id, int size, ThreadPool* pool)
        : id(id),
          size(size),
          pool(pool) {}
    const int id, size;
    ThreadPool* const pool;
    void barrier() const;  // returns when every thread of the team has called it
    // This thread's part of `count` items is [begin(count), end(count)).
    long begin(long count) const { return count * id / size; }
    long end(long count) const { return count * (id + 1) / size; }

    // Call f(from, to) for shares of `count` items. A thread takes its own part from the front, half of the rest at a
    // time. So the items that it reads lie together, and a later forward finds them in its cache again. Then it takes
    // from the back of other parts, because processors differ in speed and other work may slow one down. All threads
    // enter the same loops in the same order. A share is a multiple of `least` items, except one.
    template <class F> void share(long count, long least, F&& f) const {
        if (size == 1 || count < 4 * least * size || count >= MOST_ITEMS) {
            if (begin(count) < end(count)) f(begin(count), end(count));
            return;
        }
        loops++;
        for (long from, to; take(count, least, &from, &to);) f(from, to);
    }

   private:
    bool take(long count, long least, long* from, long* to) const;
    mutable unsigned loops = 0;  // that this thread has entered
};

typedef void (*PoolTask)(void* context, const Team& team);

// Run `task` on up to `threads` threads, the caller included. Concurrent callers wait for each other.
void thread_pool_run(PoolTask work, void* context, int threads);
void set_num_threads(int threads);
int num_threads();
// Whether the workers still spin and can start at once.
bool workers_awake();

// The same for any callable that takes a Team.
template <class F> void in_parallel(int threads, F&& work) {
    struct Call {
        static void run(void* f, const Team& team) { (*static_cast<F*>(f))(team); }
    };
    thread_pool_run(Call::run, &work, threads);
}

}  // namespace cospec
