// LD_PRELOAD: counts the file calls below a path, and lets the n-th of them fail.
//
// Python arms it by ctypes: file_errors_arm("/run/folder", 17, EIO, ONCE, "/tmp/log"). With `at` 0 nothing fails, and
// each call is written to the log as "NUMBER CALL PATH". clock_jump(-3600) sets this process's clock back by an hour.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { ONCE, FROM_HERE_ON, DONE_BUT_REPORTED, SHORT };  // the call itself is made with the last two

static char folder[PATH_MAX];  // empty: nothing is counted
static atomic_long count;
static long fail_at;
static int fail_with, mode, log_to = -1;

#define NEXT(result, name, ...)              \
    static result (*next)(__VA_ARGS__);      \
    if (!next) next = dlsym(RTLD_NEXT, #name)

static ssize_t write_log(int descriptor, const char *text, size_t size) {
    NEXT(ssize_t, write, int, const void *, size_t);
    return next(descriptor, text, size);
}

void file_errors_arm(const char *path, long at, int error, int how, const char *log) {
    folder[0] = 0;
    atomic_store(&count, 0);
    fail_at = at, fail_with = error, mode = how;
    if (log && *log) {
        int opened = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        log_to = fcntl(opened, F_DUPFD_CLOEXEC, 900);  // out of the way of what is counted
        NEXT(int, close, int);
        next(opened);
    }
    snprintf(folder, sizeof folder, "%s", path ? path : "");
}

long file_errors_count(void) { return atomic_load(&count); }

// Whether this call is to fail; 2: it is made, and fails nevertheless; 3: it is made for half of the bytes.
static int chosen(const char *call, const char *path) {
    if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) return 0;
    long number = atomic_fetch_add(&count, 1) + 1;
    if (log_to >= 0 && (!fail_at || number == fail_at)) {
        char line[PATH_MAX + 64];
        int size = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
        if (write_log(log_to, line, size) < 0) abort();
    }
    if (!fail_at || (number != fail_at && !(mode == FROM_HERE_ON && number > fail_at))) return 0;
    errno = fail_with;
    return mode == SHORT ? 3 : mode == DONE_BUT_REPORTED ? 2 : 1;
}

static const char *of_descriptor(int descriptor, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    NEXT(ssize_t, readlink, const char *, char *, size_t);
    ssize_t size = next(link, buffer, PATH_MAX - 1);
    if (size <= 0) return 0;
    buffer[size] = 0;
    return buffer;
}

static const char *absolute(int at, const char *path, char *buffer) {
    if (!path || path[0] == '/') return path;
    if (at == AT_FDCWD ? !getcwd(buffer, PATH_MAX) : !of_descriptor(at, buffer)) return path;
    size_t size = strlen(buffer);
    snprintf(buffer + size, PATH_MAX - size, "/%s", path);
    return buffer;
}

#define CHOSEN_PATH(call, at, path) \
    char buffer[PATH_MAX];          \
    int saved = errno, how = folder[0] ? chosen(call, absolute(at, path, buffer)) : 0
#define CHOSEN_DESCRIPTOR(call, descriptor) \
    char buffer[PATH_MAX];                  \
    int saved = errno, how = folder[0] ? chosen(call, of_descriptor(descriptor, buffer)) : 0
// The result of a call that is neither read nor write.
#define ANSWER(failure, made)                          \
    if (how == 1) return errno = fail_with, (failure); \
    errno = saved;                                     \
    __typeof__(made) result = (made);                  \
    if (how == 2) return errno = fail_with, (failure); \
    return result
#define MODE_ARGUMENT                        \
    mode_t permissions = 0;                  \
    if (flags & (O_CREAT | O_TMPFILE)) {     \
        va_list rest;                        \
        va_start(rest, flags);               \
        permissions = va_arg(rest, mode_t);  \
        va_end(rest);                        \
    }

#define OPEN(name)                                                           \
    int name(const char *path, int flags, ...) {                             \
        MODE_ARGUMENT NEXT(int, name, const char *, int, ...);               \
        CHOSEN_PATH(flags & O_CREAT ? "create" : "open", AT_FDCWD, path);    \
        if (how == 2) how = 1;                                               \
        ANSWER(-1, next(path, flags, permissions));                          \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                         \
    int name(int at, const char *path, int flags, ...) {                     \
        MODE_ARGUMENT NEXT(int, name, int, const char *, int, ...);          \
        CHOSEN_PATH(flags & O_CREAT ? "create" : "open", at, path);          \
        if (how == 2) how = 1;                                               \
        ANSWER(-1, next(at, path, flags, permissions));                      \
    }
OPENAT(openat)
OPENAT(openat64)

#define READ_OR_WRITE(name, call, bytes)                                                        \
    ssize_t name(int descriptor, bytes content, size_t size) {                                  \
        NEXT(ssize_t, name, int, bytes, size_t);                                                \
        CHOSEN_DESCRIPTOR(call, descriptor);                                                    \
        ANSWER(-1, next(descriptor, content, how == 3 && size > 1 ? size / 2 : size));          \
    }
READ_OR_WRITE(read, "read", void *)
READ_OR_WRITE(write, "write", const void *)
#define READ_OR_WRITE_AT(name, call, bytes, offset)                                             \
    ssize_t name(int descriptor, bytes content, size_t size, offset position) {                 \
        NEXT(ssize_t, name, int, bytes, size_t, offset);                                        \
        CHOSEN_DESCRIPTOR(call, descriptor);                                                    \
        ANSWER(-1, next(descriptor, content, how == 3 && size > 1 ? size / 2 : size, position)); \
    }
READ_OR_WRITE_AT(pread, "read", void *, off_t)
READ_OR_WRITE_AT(pread64, "read", void *, off64_t)
READ_OR_WRITE_AT(pwrite, "write", const void *, off_t)
READ_OR_WRITE_AT(pwrite64, "write", const void *, off64_t)

int fsync(int descriptor) {
    NEXT(int, fsync, int);
    CHOSEN_DESCRIPTOR("fsync", descriptor);
    ANSWER(-1, next(descriptor));
}
int fdatasync(int descriptor) {
    NEXT(int, fdatasync, int);
    CHOSEN_DESCRIPTOR("fsync", descriptor);
    ANSWER(-1, next(descriptor));
}
int close(int descriptor) {
    NEXT(int, close, int);
    if (descriptor == log_to) return 0;
    CHOSEN_DESCRIPTOR("close", descriptor);
    if (how == 1) how = 2;  // Linux closes it whatever it reports
    ANSWER(-1, next(descriptor));
}
#define TRUNCATE(name, offset)                         \
    int name(int descriptor, offset size) {            \
        NEXT(int, name, int, offset);                  \
        CHOSEN_DESCRIPTOR("truncate", descriptor);     \
        ANSWER(-1, next(descriptor, size));            \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define PATH_CALL(name)                                \
    int name(const char *path) {                       \
        NEXT(int, name, const char *);                 \
        CHOSEN_PATH(#name, AT_FDCWD, path);            \
        ANSWER(-1, next(path));                        \
    }
PATH_CALL(unlink)
PATH_CALL(rmdir)
#define PATH_CALL_WITH(name, kind, call)               \
    int name(const char *path, kind value) {           \
        NEXT(int, name, const char *, kind);           \
        CHOSEN_PATH(call, AT_FDCWD, path);             \
        ANSWER(-1, next(path, value));                 \
    }
PATH_CALL_WITH(mkdir, mode_t, "mkdir")
PATH_CALL_WITH(chmod, mode_t, "chmod")
PATH_CALL_WITH(access, int, "access")
PATH_CALL_WITH(truncate, off_t, "truncate")
PATH_CALL_WITH(truncate64, off64_t, "truncate")
PATH_CALL_WITH(stat, struct stat *, "stat")
PATH_CALL_WITH(stat64, struct stat64 *, "stat")
PATH_CALL_WITH(lstat, struct stat *, "stat")
PATH_CALL_WITH(lstat64, struct stat64 *, "stat")
PATH_CALL_WITH(statvfs, struct statvfs *, "statvfs")
PATH_CALL_WITH(statvfs64, struct statvfs64 *, "statvfs")
int unlinkat(int at, const char *path, int flags) {
    NEXT(int, unlinkat, int, const char *, int);
    CHOSEN_PATH("unlink", at, path);
    ANSWER(-1, next(at, path, flags));
}
int mkdirat(int at, const char *path, mode_t permissions) {
    NEXT(int, mkdirat, int, const char *, mode_t);
    CHOSEN_PATH("mkdir", at, path);
    ANSWER(-1, next(at, path, permissions));
}
#define TWO_PATHS(name, named)                         \
    int name(const char *path, const char *target) {   \
        NEXT(int, name, const char *, const char *);   \
        CHOSEN_PATH(#name, AT_FDCWD, named);           \
        ANSWER(-1, next(path, target));                \
    }
TWO_PATHS(rename, path)
TWO_PATHS(symlink, target)
TWO_PATHS(link, target)
int renameat(int at, const char *path, int to, const char *target) {
    NEXT(int, renameat, int, const char *, int, const char *);
    CHOSEN_PATH("rename", at, path);
    ANSWER(-1, next(at, path, to, target));
}
ssize_t readlink(const char *path, char *content, size_t size) {
    NEXT(ssize_t, readlink, const char *, char *, size_t);
    CHOSEN_PATH("readlink", AT_FDCWD, path);
    ANSWER((ssize_t)-1, next(path, content, size));
}
#define STAT_DESCRIPTOR(name, kind)                    \
    int name(int descriptor, struct kind *found) {     \
        NEXT(int, name, int, struct kind *);           \
        CHOSEN_DESCRIPTOR("fstat", descriptor);        \
        ANSWER(-1, next(descriptor, found));           \
    }
STAT_DESCRIPTOR(fstat, stat)
STAT_DESCRIPTOR(fstat64, stat64)
#define STAT_AT(name, kind)                                                 \
    int name(int at, const char *path, struct kind *found, int flags) {     \
        NEXT(int, name, int, const char *, struct kind *, int);             \
        CHOSEN_PATH("stat", at, path);                                      \
        ANSWER(-1, next(at, path, found, flags));                           \
    }
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)
DIR *opendir(const char *path) {
    NEXT(DIR *, opendir, const char *);
    CHOSEN_PATH("opendir", AT_FDCWD, path);
    if (how == 2) how = 1;
    ANSWER((DIR *)0, next(path));
}
#define READDIR(name, kind)                                                            \
    struct kind *name(DIR *stream) {                                                   \
        NEXT(struct kind *, name, DIR *);                                              \
        CHOSEN_DESCRIPTOR("readdir", dirfd(stream));                                   \
        if (how == 2) how = 1;                                                         \
        ANSWER((struct kind *)0, next(stream));                                        \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
int flock(int descriptor, int operation) {
    NEXT(int, flock, int, int);
    CHOSEN_DESCRIPTOR("flock", descriptor);
    ANSWER(-1, next(descriptor, operation));
}
#define MAP(name, offset)                                                                      \
    void *name(void *at, size_t size, int protection, int flags, int descriptor, offset first) { \
        NEXT(void *, name, void *, size_t, int, int, int, offset);                             \
        CHOSEN_DESCRIPTOR("mmap", descriptor);                                                 \
        if (how == 2) how = 1;                                                                 \
        ANSWER(MAP_FAILED, next(at, size, protection, flags, descriptor, first));              \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)
ssize_t sendfile(int to, int from, off_t *position, size_t size) {
    NEXT(ssize_t, sendfile, int, int, off_t *, size_t);
    CHOSEN_DESCRIPTOR("write", to);
    ANSWER((ssize_t)-1, next(to, from, position, size));
}
ssize_t sendfile64(int to, int from, off64_t *position, size_t size) {
    NEXT(ssize_t, sendfile64, int, int, off64_t *, size_t);
    CHOSEN_DESCRIPTOR("write", to);
    ANSWER((ssize_t)-1, next(to, from, position, size));
}

static _Atomic long clock_offset;  // seconds

void clock_jump(long seconds) { atomic_store(&clock_offset, seconds); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(int, clock_gettime, clockid_t, struct timespec *);
    int result = next(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += atomic_load(&clock_offset);
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    NEXT(int, gettimeofday, struct timeval *, void *);
    int result = next(now, zone);
    if (!result) now->tv_sec += atomic_load(&clock_offset);
    return result;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
