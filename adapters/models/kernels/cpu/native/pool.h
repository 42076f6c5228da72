// A few threads that share one loop, without a second OpenMP beside torch's. They start at the first call. The caller works
// too, and does not wait for threads that have not begun, so a thread that the system does not run costs nothing. Of two
// calls at the same time the second one runs its loop alone.
//
// A helper that has nothing to do spins for a while, then sleeps. One that spins takes no lock: with a lock the helpers
// would pass it from one to the next, each asleep until its turn, before most of them could work. One word, the door, has
// the number of the loop and the places left in it. A helper joins by taking a place while the number is the same. The
// caller closes the door by taking all places that are left, so it knows how many helpers it must wait for. Locks
// serve only those that sleep: who is about to sleep says so first and then looks once more, and who changes something
// looks for sleepers afterwards. Both do so in one order for all threads, so one of them sees the other.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#define MOST_HELPERS 255
#define PAUSES 64 // between two looks at the clock
#define SPINS 8000 // pauses before a caller sleeps that waits for helpers
#define BRIEFLY 100000L // nanoseconds that a helper spins behind a loop: loops of a step have less between them

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

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; // of the caller whose loop is shared
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; // of threads that fall asleep and wake up
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static loop_t *shared;                                // belongs to those that took a place, until they are done
static int helpers;                                   // threads there are; changed by the caller that is busy
static _Alignas(64) atomic_ullong door;               // upper half: the number of the loop; lower half: places left
static _Alignas(64) atomic_int done;                  // helpers that took a place and have left the loop
static atomic_int sleepers, waiting;                  // helpers that sleep or are about to; whether the caller is
static atomic_long patience = BRIEFLY;                // nanoseconds that helpers spin

#define NUMBER_OF(word) ((unsigned)((word) >> 32))
#define PLACES_OF(word) ((unsigned)(word))

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void run_loop(loop_t *loop) {
    for (;;) {
        const long at = atomic_fetch_add(&loop->next, 1);
        if (at >= loop->count) return;
        loop->work(loop->of, at);
    }
}

// Wait for a loop of another number. Returns the door.
static unsigned long long await_loop(unsigned seen) {
    unsigned long long word;
    const long start = nanoseconds();
    do {
        for (int pause = 0; pause < PAUSES; pause++) {
            word = atomic_load(&door);
            if (NUMBER_OF(word) != seen) return word;
            PAUSE();
        }
    } while (nanoseconds() - start < atomic_load(&patience));
    pthread_mutex_lock(&guard);
    atomic_fetch_add(&sleepers, 1);
    while (NUMBER_OF(word = atomic_load(&door)) == seen) pthread_cond_wait(&begun, &guard);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&guard);
    return word;
}

static void *help(void *nothing) {
    unsigned seen = 0;
    for (;;) {
        unsigned long long word = await_loop(seen);
        int joined = 0;
        while (!joined && PLACES_OF(word)) joined = atomic_compare_exchange_weak(&door, &word, word - 1);
        seen = NUMBER_OF(word);
        if (!joined) continue;
        run_loop(shared);
        atomic_fetch_add(&done, 1);
        if (!atomic_load(&waiting)) continue;
        pthread_mutex_lock(&guard);
        pthread_cond_signal(&ended);
        pthread_mutex_unlock(&guard);
    }
    return nothing;
}

static void grow(int wanted) { // signals are for the program's own threads
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; helpers < wanted; helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void forked(void) { // a child has none of these threads
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&guard, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&ended, NULL);
    helpers = 0;
    atomic_store(&door, atomic_load(&door) >> 32 << 32); // without the places of a loop that only the parent runs
    atomic_store(&sleepers, 0);
    atomic_store(&waiting, 0);
}

__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(NULL, NULL, forked); }

// A new number, with so many places. Called by the one that is busy. Returns the door.
static unsigned long long open_door(unsigned places) {
    const unsigned long long word = (unsigned long long)(NUMBER_OF(atomic_load(&door)) + 1) << 32 | places;
    atomic_store(&door, word);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&guard);
        pthread_cond_broadcast(&begun);
        pthread_mutex_unlock(&guard);
    }
    return word;
}

// Wait until so many helpers are done with the loop.
static void await_helpers(int joined) {
    for (int pause = 0; pause < SPINS && atomic_load(&done) < joined; pause++) PAUSE();
    if (atomic_load(&done) == joined) return;
    pthread_mutex_lock(&guard);
    atomic_store(&waiting, 1);
    while (atomic_load(&done) < joined) pthread_cond_wait(&ended, &guard);
    atomic_store(&waiting, 0);
    pthread_mutex_unlock(&guard);
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
    atomic_store(&patience, BRIEFLY);
    const unsigned long long opened = open_door((unsigned)wanted);
    run_loop(&loop);
    const unsigned long long left = atomic_exchange(&door, opened - (unsigned long long)wanted);
    await_helpers((int)wanted - (int)PLACES_OF(left));
    pthread_mutex_unlock(&busy);
}

// Wake the helpers up and let them spin for so many nanoseconds, or until the next loop: one will come soon.
void rekindle_expect_loop(long wait) {
    if (pthread_mutex_trylock(&busy)) return; // they are awake
    atomic_store(&patience, wait);
    open_door(0);
    pthread_mutex_unlock(&busy);
}
