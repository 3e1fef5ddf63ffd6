#include "pool.h"

#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

static constexpr int MOST_THREADS = 64;

// What the threads share; what different threads write lies on different cache lines.
// A pool has a fixed size and is never destroyed, since workers may look at it until the process has ended.
struct Pool {
    explicit Pool(int threads) : size(threads) {}
    const int size;  // the caller included
    int started = 0;
    int caller_cpu = -1;
    std::atomic<int> ids[MOST_THREADS] = {};  // the system's numbers of the workers
    Work work = nullptr;
    void* context = nullptr;
    int team = 1;  // threads of the work at hand
    bool stopping = false;
    pthread_mutex_t use = PTHREAD_MUTEX_INITIALIZER;    // held during a piece of work
    pthread_mutex_t sleep = PTHREAD_MUTEX_INITIALIZER;  // guards `wake`
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    alignas(64) std::atomic<unsigned> round{0};
    alignas(64) std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int> busy{0};  // workers that have not ended the round
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> generation{0};
};

namespace {

constexpr int IDLE_SPINS = 5000;   // before a worker sleeps; some 150 microseconds
constexpr int TEAM_SPINS = 20000;  // before a thread that waits for its team lets others run

std::atomic<Pool*> current{new Pool(1)};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void await_round(Pool* p, unsigned seen) {
    for (int spins = 0; spins < IDLE_SPINS; spins++) {
        if (p->round.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    pthread_mutex_lock(&p->sleep);
    p->sleepers.fetch_add(1);  // before looking at the round again: `announce` writes that first, then reads this
    while (p->round.load() == seen) pthread_cond_wait(&p->wake, &p->sleep);
    p->sleepers.fetch_sub(1);
    pthread_mutex_unlock(&p->sleep);
}

void announce(Pool* p) {
    p->round.fetch_add(1);
    if (p->sleepers.load() == 0) return;
    pthread_mutex_lock(&p->sleep);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->sleep);
}

#if defined(__linux__)
// Keep the workers off the processor that the caller is on. Left alone, a scheduler that has background work for every
// processor may put two spinning threads of a team on one and leave them there, which costs a thousandfold.
void spread(Pool* p) {
    static const cpu_set_t allowed = [] {
        cpu_set_t set;
        if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
        return set;
    }();
    const int cpu = sched_getcpu(), count = CPU_COUNT(&allowed);
    if (cpu == p->caller_cpu || cpu < 0 || count < 2 || count >= 2 * p->size) return;
    p->caller_cpu = cpu;
    cpu_set_t others = allowed;
    CPU_CLR(cpu, &others);
    for (int i = 1; i <= p->started; i++)
        if (const int id = p->ids[i].load()) sched_setaffinity(id, sizeof others, &others);
        else p->caller_cpu = -1;  // not running yet: once more next time
}
int own_id() { return (int)syscall(SYS_gettid); }
#else
void spread(Pool*) {}
int own_id() { return 1; }
#endif

struct Start {
    Pool* pool;
    int id;
};

void* worker(void* argument) {
    const Start start = *static_cast<Start*>(argument);
    delete static_cast<Start*>(argument);
    Pool* p = start.pool;
    p->ids[start.id].store(own_id());
    for (unsigned seen = 0;; seen++) {
        await_round(p, seen);
        if (p->stopping) return nullptr;
        if (start.id < p->team) p->work(p->context, Team{start.id, p->team, p});
        p->busy.fetch_sub(1, std::memory_order_release);
    }
}

// All workers start before the first round, so each counts rounds from 0.
void start_workers(Pool* p) {
    if (p->started || p->round.load()) return;
    while (p->started < p->size - 1) {
        pthread_t thread;
        Start* start = new Start{p, p->started + 1};
        if (pthread_create(&thread, nullptr, worker, start) != 0) {
            delete start;
            break;
        }
        pthread_detach(thread);
        p->started++;
    }
}

// A forked child has none of the workers, and perhaps a lock that nobody will open.
void after_fork() { current.store(new Pool(current.load()->size)); }

const int fork_handler = pthread_atfork(nullptr, nullptr, after_fork);

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
        spins < TEAM_SPINS ? relax() : (void)sched_yield();
}

void pool_run(Work work, void* context, int threads) {
    Pool* p = current.load();
    if (threads > p->size) threads = p->size;
    if (threads <= 1) return work(context, Team{0, 1, p});
    pthread_mutex_lock(&p->use);
    start_workers(p);
    spread(p);
    p->work = work;
    p->context = context;
    p->team = threads <= p->started + 1 ? threads : p->started + 1;
    p->busy.store(p->started);
    announce(p);
    work(context, Team{0, p->team, p});
    for (int spins = 0; p->busy.load(std::memory_order_acquire); spins++)
        spins < TEAM_SPINS ? relax() : (void)sched_yield();
    pthread_mutex_unlock(&p->use);
}

void pool_set_threads(int threads) {
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    Pool* old = current.load();
    if (threads == old->size) return;
    pthread_mutex_lock(&old->use);
    current.store(new Pool(threads));
    old->stopping = true;
    announce(old);
    pthread_mutex_unlock(&old->use);
}

int pool_threads() { return current.load()->size; }

bool pool_awake() {
    const Pool* p = current.load();
    return p->started > 0 && p->sleepers.load(std::memory_order_relaxed) == 0;
}
