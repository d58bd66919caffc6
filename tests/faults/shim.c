/* Faults at system calls, by LD_PRELOAD: which calls fail, and how, stands in a file that two processes map.
 *
 * A process takes part from the moment it calls faults_attach. struct rule is `Rule` of shim.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NUM_RULES = 16, PATH_BYTES = 256 };
enum call { OPEN = 1, READ = 2, FSTAT = 4, WRITE = 8, CLOSE = 16, MKDIR = 32, MEMORY = 128 };
enum action { COUNT, FAIL, SHORT, SLOW, HOLD };

struct rule {
    char mark[PATH_BYTES];  /* nothing matches before a folder with this in its path was made; empty: at once */
    char path[PATH_BYTES];  /* must be part of the file's path; MEMORY has none */
    int64_t first, last;    /* the call touches bytes [first, last) of the file; MEMORY: its size lies there */
    int64_t skip, times;    /* so many matching calls pass, then so many are acted on; times < 0: all */
    int64_t argument;       /* FAIL: errno; SHORT: bytes at most; SLOW: bytes per second, and per call */
    int32_t calls, action;
    int64_t first_fired_ns; /* CLOCK_MONOTONIC */
    int32_t enabled, marked, num_matched, num_fired, released;
    int32_t unused;
};

static struct rule *rules;

int faults_attach(const char *file) {
    int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return -errno;
    void *memory = mmap(NULL, NUM_RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (memory == MAP_FAILED) return -errno;
    rules = memory;
    return sizeof(struct rule);
}

static void sleep_ns(int64_t left) {
    struct timespec time = {left / 1000000000, left % 1000000000};
    nanosleep(&time, NULL);
}

/* Returns the rule to act on, if any; holds the call where one says so. */
static struct rule *fired(int call, const char *path, int64_t offset, int64_t nbytes) {
    struct rule *found = NULL;
    for (struct rule *rule = rules; rule < rules + NUM_RULES; rule++) {
        if (!__atomic_load_n(&rule->enabled, __ATOMIC_ACQUIRE)) continue;
        if (call == MKDIR && rule->mark[0] && strstr(path, rule->mark)) rule->marked = 1;
        if (path == NULL ? call != MEMORY : strstr(path, rule->path) == NULL) continue;
        if (!(rule->calls & call) || (rule->mark[0] && !rule->marked)) continue;
        if (rule->last >= 0 && call == MEMORY && (nbytes < rule->first || nbytes >= rule->last)) continue;
        if (rule->last >= 0 && call != MEMORY && (offset >= rule->last || offset + nbytes <= rule->first)) continue;
        int64_t number = __atomic_fetch_add(&rule->num_matched, 1, __ATOMIC_RELAXED) - rule->skip;
        if (number < 0 || (rule->times >= 0 && number >= rule->times) || rule->action == COUNT) continue;
        if (rule->num_fired == 0) {
            struct timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            rule->first_fired_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
        }
        __atomic_add_fetch(&rule->num_fired, 1, __ATOMIC_RELEASE);
        if (found == NULL) found = rule;
    }
    if (found != NULL && found->action == HOLD)
        while (__atomic_load_n(&found->enabled, __ATOMIC_ACQUIRE) && !__atomic_load_n(&found->released, __ATOMIC_ACQUIRE))
            sleep_ns(20000000);  // seldom: the time of the processor that it takes counts as getting on
    return found;
}

static struct rule *fired_on(int call, int descriptor, int64_t offset, int64_t nbytes) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    return fired(call, path, offset, nbytes);
}

/* What the caller gets to see of a fault: true if the call must not be made. */
static int fails(const struct rule *rule) {
    if (rule == NULL || rule->action != FAIL) return 0;
    errno = rule->argument;
    return 1;
}

static size_t at_most(const struct rule *rule, size_t nbytes) {
    return rule != NULL && (rule->action == SHORT || rule->action == SLOW) && (size_t)rule->argument < nbytes ? (size_t)rule->argument
                                                                                    : nbytes;
}

static ssize_t slowly(const struct rule *rule, ssize_t nbytes) {
    if (rule != NULL && rule->action == SLOW && nbytes > 0) sleep_ns(nbytes * 1000000000LL / rule->argument);
    return nbytes;
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (real == NULL) real = dlsym(RTLD_NEXT, name)

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return rules != NULL && fails(fired(OPEN, path, 0, 0)) ? -1 : real(path, flags, mode); \
    }
#define DEFINE_OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, #name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return rules != NULL && fails(fired(OPEN, path, 0, 0)) ? -1 : real(folder, path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

ssize_t read(int descriptor, void *memory, size_t nbytes) {
    REAL(ssize_t, "read", int, void *, size_t);
    if (rules == NULL) return real(descriptor, memory, nbytes);
    struct rule *rule = fired_on(READ, descriptor, lseek(descriptor, 0, SEEK_CUR), nbytes);
    return fails(rule) ? -1 : slowly(rule, real(descriptor, memory, at_most(rule, nbytes)));
}

#define DEFINE_PREAD(name) \
    ssize_t name(int descriptor, void *memory, size_t nbytes, off_t offset) { \
        REAL(ssize_t, #name, int, void *, size_t, off_t); \
        if (rules == NULL) return real(descriptor, memory, nbytes, offset); \
        struct rule *rule = fired_on(READ, descriptor, offset, nbytes); \
        return fails(rule) ? -1 : slowly(rule, real(descriptor, memory, at_most(rule, nbytes), offset)); \
    }
DEFINE_PREAD(pread)
DEFINE_PREAD(pread64)

static ssize_t read_vector(int descriptor, const struct iovec *parts, int count, off_t offset, int flags) {
    REAL(ssize_t, "preadv2", int, const struct iovec *, int, off_t, int);
    if (rules == NULL) return real(descriptor, parts, count, offset, flags);
    size_t nbytes = 0;
    for (int number = 0; number < count; number++) nbytes += parts[number].iov_len;
    struct rule *rule = fired_on(READ, descriptor, offset, nbytes);
    if (fails(rule)) return -1;
    if (at_most(rule, nbytes) < nbytes) {
        struct iovec part = {parts[0].iov_base, at_most(rule, parts[0].iov_len)};
        return real(descriptor, &part, 1, offset, flags);
    }
    return slowly(rule, real(descriptor, parts, count, offset, flags));
}
ssize_t preadv(int descriptor, const struct iovec *parts, int count, off_t offset) {
    return read_vector(descriptor, parts, count, offset, 0);
}
ssize_t preadv64(int descriptor, const struct iovec *parts, int count, off_t offset) {
    return read_vector(descriptor, parts, count, offset, 0);
}
ssize_t preadv2(int descriptor, const struct iovec *parts, int count, off_t offset, int flags) {
    return read_vector(descriptor, parts, count, offset, flags);
}
ssize_t preadv64v2(int descriptor, const struct iovec *parts, int count, off_t offset, int flags) {
    return read_vector(descriptor, parts, count, offset, flags);
}

/* One body for all names: older headers turn fstat into __fxstat, and some lack its declaration. */
static int stat_descriptor(int descriptor, struct stat *found) {
    if (rules != NULL && fails(fired_on(FSTAT, descriptor, 0, 0))) return -1;
    return fstatat(descriptor, "", found, AT_EMPTY_PATH);
}
int fstat(int descriptor, struct stat *found) { return stat_descriptor(descriptor, found); }
int fstat64(int descriptor, struct stat64 *found) { return stat_descriptor(descriptor, (struct stat *)found); }
int __fxstat(int version, int descriptor, struct stat *found) {
    (void)version;
    return stat_descriptor(descriptor, found);
}
int __fxstat64(int version, int descriptor, struct stat64 *found) {
    (void)version;
    return stat_descriptor(descriptor, (struct stat *)found);
}

ssize_t write(int descriptor, const void *memory, size_t nbytes) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (rules == NULL) return real(descriptor, memory, nbytes);
    struct rule *rule = fired_on(WRITE, descriptor, lseek(descriptor, 0, SEEK_CUR), nbytes);
    return fails(rule) ? -1 : real(descriptor, memory, at_most(rule, nbytes));
}

#define DEFINE_PWRITE(name) \
    ssize_t name(int descriptor, const void *memory, size_t nbytes, off_t offset) { \
        REAL(ssize_t, #name, int, const void *, size_t, off_t); \
        if (rules == NULL) return real(descriptor, memory, nbytes, offset); \
        struct rule *rule = fired_on(WRITE, descriptor, offset, nbytes); \
        return fails(rule) ? -1 : real(descriptor, memory, at_most(rule, nbytes), offset); \
    }
DEFINE_PWRITE(pwrite)
DEFINE_PWRITE(pwrite64)

/* As Linux does it: the descriptor is gone also where an error is reported. */
int close(int descriptor) {
    REAL(int, "close", int);
    int failed = rules != NULL && fails(fired_on(CLOSE, descriptor, 0, 0));
    int error = errno, result = real(descriptor);
    if (!failed) return result;
    errno = error;
    return -1;
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return rules != NULL && fails(fired(MKDIR, path, 0, 0)) ? -1 : real(path, mode);
}

int posix_memalign(void **memory, size_t alignment, size_t nbytes) {
    REAL(int, "posix_memalign", void **, size_t, size_t);
    struct rule *rule = rules == NULL ? NULL : fired(MEMORY, NULL, 0, nbytes);
    return rule != NULL && rule->action == FAIL ? (int)rule->argument : real(memory, alignment, nbytes);
}
