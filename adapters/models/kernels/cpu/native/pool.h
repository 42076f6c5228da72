// A few threads that share one loop, without a second OpenMP beside torch's. They start at the first call. The caller works
// too, and does not wait for threads that have not begun, so a thread that the system does not run costs nothing. Of two
// calls at the same time the second one runs its loop alone.
//
// A helper that has nothing to do spins for a while, then sleeps. While it spins it gives way to other threads: one of
// them may be a helper that has work, for which the caller waits. Helpers have no lock in common, which each would have to
// take before it can work. Instead one word, the door, has the number of the loop and the places left in it. A helper
// joins by taking a place while the number is the same. The caller closes the door by taking all places that are left, so
// it knows how many helpers it must wait for. To sleep, a helper has a lock of its own: it says that it sleeps and then
// looks at the door once more, and the caller changes the door and then looks for sleepers. Atomics are in one order for
// all threads, so one of both sees the other. The caller sleeps in the same way if helpers take long.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#define MOST_HELPERS 255
#define PAUSES 64 // before a thread that spins gives way to others and looks at the clock
#define BRIEFLY 200000L // nanoseconds that a thread spins: loops of a step have less between them

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef void (*work_t)(void *, long);

typedef struct {
    work_t work;
    void *of;
    long count;
    _Alignas(64) atomic_long next;
} loop_t;

typedef struct { // a place to sleep
    _Alignas(64) pthread_mutex_t guard;
    pthread_cond_t woken;
    atomic_int sleeps; // or is about to
} bed_t;

#define EMPTY_BED {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0}

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; // of the caller whose loop is shared
static loop_t *shared;                                   // of those that took a place, until they are done
static int helpers;                                      // threads there are; changed by the caller that is busy
static bed_t beds[MOST_HELPERS], caller = EMPTY_BED;
static _Alignas(64) atomic_ullong door; // upper half: the number of the loop; lower half: places left
static _Alignas(64) atomic_int done;    // helpers that took a place and have left the loop
static atomic_long patience = BRIEFLY;  // nanoseconds that helpers spin

#define NUMBER_OF(word) ((unsigned)((word) >> 32))
#define PLACES_OF(word) ((unsigned)(word))

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static int is_open(unsigned seen) { return NUMBER_OF(atomic_load(&door)) != seen; }

static int are_done(unsigned joined) { return (unsigned)atomic_load(&done) >= joined; }

// Wait until holds(of). A thread that spins gives way to those that the system could run in its place.
static void await(int (*holds)(unsigned), unsigned of, long spin, bed_t *bed) {
    const long start = nanoseconds();
    do {
        for (int pause = 0; pause < PAUSES; pause++) {
            if (holds(of)) return;
            PAUSE();
        }
        sched_yield();
    } while (nanoseconds() - start < spin);
    pthread_mutex_lock(&bed->guard);
    atomic_store(&bed->sleeps, 1);
    while (!holds(of)) pthread_cond_wait(&bed->woken, &bed->guard);
    atomic_store(&bed->sleeps, 0);
    pthread_mutex_unlock(&bed->guard);
}

static void wake(bed_t *bed) {
    if (!atomic_load(&bed->sleeps)) return;
    pthread_mutex_lock(&bed->guard);
    pthread_cond_signal(&bed->woken);
    pthread_mutex_unlock(&bed->guard);
}

static void run_loop(loop_t *loop) {
    for (;;) {
        const long at = atomic_fetch_add(&loop->next, 1);
        if (at >= loop->count) return;
        loop->work(loop->of, at);
    }
}

static void *help(void *bed) {
    unsigned seen = 0;
    for (;;) {
        await(is_open, seen, atomic_load(&patience), bed);
        unsigned long long word = atomic_load(&door);
        int joined = 0;
        while (!joined && PLACES_OF(word)) joined = atomic_compare_exchange_weak(&door, &word, word - 1);
        seen = NUMBER_OF(word);
        if (!joined) continue;
        run_loop(shared);
        atomic_fetch_add(&done, 1);
        wake(&caller);
    }
    return NULL;
}

static void grow(int wanted) { // signals are for the program's own threads
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; helpers < wanted; helpers++) {
        pthread_t thread;
        beds[helpers] = (bed_t)EMPTY_BED;
        if (pthread_create(&thread, NULL, help, &beds[helpers])) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void forked(void) { // a child has none of these threads
    pthread_mutex_init(&busy, NULL);
    caller = (bed_t)EMPTY_BED;
    helpers = 0;
    atomic_store(&door, atomic_load(&door) >> 32 << 32); // without the places of a loop that only the parent runs
}

__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(NULL, NULL, forked); }

// A new number, with so many places. Called by the one that is busy. Returns the door.
static unsigned long long open_door(unsigned places) {
    const unsigned long long word = (unsigned long long)(NUMBER_OF(atomic_load(&door)) + 1) << 32 | places;
    atomic_store(&door, word);
    return word;
}

// work(of, 0) ... work(of, count - 1), by up to so many threads, in any order.
static void share(int threads, long count, work_t work, void *of) {
    loop_t loop = {work, of, count, 0};
    long wanted = (threads < count ? threads : count) - 1;
    if (wanted > MOST_HELPERS) wanted = MOST_HELPERS;
    if (wanted < 1 || pthread_mutex_trylock(&busy)) {
        run_loop(&loop);
        return;
    }
    if (helpers < wanted) grow((int)wanted);
    shared = &loop;
    atomic_store(&done, 0);
    const unsigned long long opened = open_door((unsigned)wanted);
    for (int helper = 0; helper < helpers && helper < wanted; helper++) wake(&beds[helper]);
    run_loop(&loop);
    const unsigned long long left = atomic_exchange(&door, opened - (unsigned long long)wanted);
    await(are_done, (unsigned)wanted - PLACES_OF(left), BRIEFLY, &caller);
    pthread_mutex_unlock(&busy);
}

// Wake the helpers, because a loop will come soon. From now on they spin for so many nanoseconds before they sleep.
void rekindle_expect_loop(long spin) {
    atomic_store(&patience, spin);
    if (pthread_mutex_trylock(&busy)) return; // they are awake
    open_door(0);
    for (int helper = 0; helper < helpers; helper++) wake(&beds[helper]);
    pthread_mutex_unlock(&busy);
}
