// A few threads that share one loop, without a second OpenMP beside torch's. They start at the first call and sleep in
// between. The caller works too, and does not wait for threads that have not begun, so a thread that the system does not
// run costs nothing. Of two calls at the same time the second one runs its loop alone.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#define MOST_HELPERS 255
#define SPINS 8000 // pauses before a thread sleeps, some 0.1 ms: calls of a step follow each other with less between them

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
    atomic_long next;
} loop_t;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; // of the caller whose loop is shared
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; // of what follows
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static loop_t *shared;
static int helpers, places;         // threads there are; that may still join the loop
static atomic_int joined;           // that work on it now
static atomic_uint generation;      // counts the loops

static void run_loop(loop_t *loop) {
    for (;;) {
        const long at = atomic_fetch_add(&loop->next, 1);
        if (at >= loop->count) return;
        loop->work(loop->of, at);
    }
}

static void *help(void *nothing) {
    unsigned seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&generation) == seen; spin++) PAUSE();
        pthread_mutex_lock(&guard);
        while (atomic_load(&generation) == seen) pthread_cond_wait(&begun, &guard);
        seen = atomic_load(&generation);
        loop_t *const loop = places > 0 ? shared : NULL;
        if (loop) {
            places--;
            atomic_fetch_add(&joined, 1);
        }
        pthread_mutex_unlock(&guard);
        if (!loop) continue;
        run_loop(loop);
        pthread_mutex_lock(&guard);
        if (atomic_fetch_sub(&joined, 1) == 1) pthread_cond_signal(&ended);
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
    shared = NULL;
    helpers = places = 0;
    atomic_store(&joined, 0);
}

__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(NULL, NULL, forked); }

// work(of, 0) ... work(of, count - 1), by up to so many threads, in any order.
static void share(int threads, long count, work_t work, void *of) {
    loop_t loop = {work, of, count, 0};
    long wanted = (threads < count ? threads : count) - 1;
    if (wanted > MOST_HELPERS) wanted = MOST_HELPERS;
    if (wanted < 1 || pthread_mutex_trylock(&busy)) {
        run_loop(&loop);
        return;
    }
    pthread_mutex_lock(&guard);
    if (helpers < wanted) grow((int)wanted);
    shared = &loop;
    places = (int)wanted;
    atomic_fetch_add(&generation, 1);
    pthread_cond_broadcast(&begun);
    pthread_mutex_unlock(&guard);
    run_loop(&loop);
    pthread_mutex_lock(&guard);
    shared = NULL;
    places = 0;
    pthread_mutex_unlock(&guard);
    for (int spin = 0; spin < SPINS && atomic_load(&joined); spin++) PAUSE();
    pthread_mutex_lock(&guard);
    while (atomic_load(&joined)) pthread_cond_wait(&ended, &guard);
    pthread_mutex_unlock(&guard);
    pthread_mutex_unlock(&busy);
}
