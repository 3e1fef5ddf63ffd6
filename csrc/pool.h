// A few threads that take part in one piece of work after the other.
//
// An own pool because the OpenMP runtime that torch brings cannot be shared without linking against torch's copy of it.
// Workers spin for a short while after their work and then sleep, so that an idle process takes no processor time.
#pragma once

struct Pool;

// Handed to each thread of a piece of work.
struct Team {
    int id, size;
    Pool* pool;
    void barrier() const;  // returns when every thread of the team has called it
    // The share of `count` things of this thread is [begin(count), end(count)).
    long begin(long count) const { return count * id / size; }
    long end(long count) const { return count * (id + 1) / size; }
};

typedef void (*Work)(void* context, const Team& team);

// Runs `work` on up to `threads` threads, the caller among them. Of several callers, one at a time.
void pool_run(Work work, void* context, int threads);
void pool_set_threads(int threads);
int pool_threads();
// Whether the workers still spin, so that they take part at once.
bool pool_awake();

// The same for anything that can be called with a Team.
template <class F> void in_parallel(int threads, F&& work) {
    struct Call {
        static void run(void* f, const Team& team) { (*static_cast<F*>(f))(team); }
    };
    pool_run(Call::run, &work, threads);
}
