/* A disk that dies on command. Loaded with LD_PRELOAD, it stands between the process and glibc's file calls and counts
 * those that concern paths below one folder. The Nth of them can kill the process, be torn, fail or stand still; all of
 * them can be written to a journal, from which tools.faults.power works out what a power cut would have left.
 * Linux and glibc only. Nothing is counted before shim_arm().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Kinds of calls: bits, so that a mask picks some. tools.faults.shim has the same table. */
enum { LOOK = 1, MAKE = 2, WRITE = 4, SYNC = 8, RENAME = 16, UNLINK = 32, FOLDER = 64, CUT = 128, READ = 256 };

enum { COUNT, KILL_BEFORE, KILL_AFTER, TORN, FAIL_ONCE, FAIL_FROM, SHORT, STALL };

#define FDS 4096
#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static struct { int handle; char *path; } table[FDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   /* the counters and the table */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;  /* with a journal: one call at a time, in its order */
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int armed, mode, mask, number, report = -1, journal = -1, handles, stopped;
static long at, count, fired;

/* -- what the tests call ------------------------------------------------------------------------------------------ */

void shim_arm(const char *folder, int how, long when, int which, int error, int report_fd, int journal_fd) {
  snprintf(root, sizeof root, "%s", folder);
  root_length = strlen(root);
  mode = how, at = when, mask = which, number = error, report = report_fd, journal = journal_fd;
  count = fired = 0;
  stopped = how == STALL;
  __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

/* From now on nothing fails or stands still; counting and the journal go on. */
void shim_lift(void) {
  pthread_mutex_lock(&lock);
  mode = COUNT;
  stopped = 0;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
}

long shim_count(void) { return __atomic_load_n(&count, __ATOMIC_SEQ_CST); }
long shim_fired(void) { return __atomic_load_n(&fired, __ATOMIC_SEQ_CST); }

/* -- the journal: one record a call: op, handle, two numbers, two lengths, path, data ------------------------------ */

struct record { char op; int32_t handle; int64_t a, b; uint32_t path, data; } __attribute__((packed));

static void note(char op, int handle, int64_t a, int64_t b, const char *path, const void *data, size_t size) {
  if (journal < 0) return;
  struct record head = {op, handle, a, b, path ? strlen(path) : 0, size};
  struct iovec parts[3] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)data, size}};
  int kept = errno;
  syscall(SYS_writev, journal, parts, 3);
  errno = kept;
}

/* A word of the scenario: to the report, and into the journal at its place among the calls. */
void shim_say(const char *text) {
  size_t length = strlen(text);
  if (journal >= 0) {
    pthread_mutex_lock(&order);
    note('Y', 0, 0, 0, 0, text, length);
    pthread_mutex_unlock(&order);
  }
  while (length) {
    long wrote = syscall(SYS_write, report, text, length);
    if (wrote < 0) return;
    text += wrote, length -= wrote;
  }
}

/* -- which call it is, and what becomes of it ---------------------------------------------------------------------- */

static int below(const char *path) {
  return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path into `whole`; NULL when it is not below the root. */
static const char *place(int folder, const char *path, char *whole) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST) || !path) return NULL;
  if (path[0] == '/') {
    snprintf(whole, PATH_MAX, "%s", path);
  } else {
    char name[64], base[PATH_MAX / 2];
    if (folder == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(name, base, sizeof base - 1);
    if (length < 0) return NULL;
    base[length] = 0;
    if (snprintf(whole, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return NULL;
  }
  return below(whole) ? whole : NULL;
}

static const char *path_of(int fd) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST) || fd < 0 || fd >= FDS) return NULL;
  return table[fd].path;
}

static const char *name_of(int kind) {
  static const char *const names[] = {"open",   "create", "write",    "fsync", "rename",
                                      "unlink", "mkdir",  "truncate", "read"};
  return names[__builtin_ctz(kind)];
}

static void tell(long n, int kind, const char *path) {
  char text[PATH_MAX + 64];
  const char *rest = strlen(path) > root_length ? path + root_length + 1 : ".";
  int length = snprintf(text, sizeof text, "!%ld %s %s\n", n, name_of(kind), rest);
  syscall(SYS_write, report, text, length);
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

enum verdict { GO, FAIL, HALF, HALF_AND_DIE, GO_AND_DIE };

static enum verdict judge(int kind, const char *path) {
  if (!(kind & mask)) return GO;
  pthread_mutex_lock(&lock);
  long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
  enum verdict verdict = GO;
  int hit = n == at, first = hit && mode != COUNT;
  switch (mode) {
    case KILL_BEFORE:
      if (hit) {
        if (journal >= 0) pthread_mutex_lock(&order);  /* no other call is between its deed and its record */
        tell(n, kind, path);
        die();
      }
      break;
    case KILL_AFTER: if (hit) verdict = GO_AND_DIE; break;
    case TORN: if (hit) verdict = HALF_AND_DIE; break;
    case SHORT: if (hit) verdict = HALF; break;
    case FAIL_ONCE: if (hit) verdict = FAIL; break;
    case FAIL_FROM: if (n >= at) verdict = FAIL; break;
    case STALL:
      if (n >= at) {
        fired++;
        while (stopped) pthread_cond_wait(&released, &lock);
      }
      break;
  }
  if (first) tell(n, kind, path);
  if (verdict != GO) __atomic_add_fetch(&fired, 1, __ATOMIC_SEQ_CST);
  /* A full disk takes the first half of what finds it full. */
  if (verdict == FAIL && mode == FAIL_FROM && n == at && number == ENOSPC && kind == WRITE) verdict = HALF;
  pthread_mutex_unlock(&lock);
  return verdict;
}

/* Between `enter` and `leave` calls are one after the other, when there is a journal. */
static void enter(void) { if (journal >= 0) pthread_mutex_lock(&order); }
static void leave(void) { if (journal >= 0) pthread_mutex_unlock(&order); }

#define PLAIN(kind, path, call, record) \
  do { \
    enum verdict verdict = judge(kind, path); \
    if (verdict == FAIL) { record(-2); errno = number; return -1; } \
    enter(); \
    int result = (call), kept = errno; \
    record(result); \
    leave(); \
    if (verdict >= HALF_AND_DIE) die(); \
    errno = kept; \
    return result; \
  } while (0)

/* -- open and close ------------------------------------------------------------------------------------------------ */

static int opened(int (*call)(int, const char *, int, mode_t), int folder, const char *path, int flags, mode_t bits) {
  char whole[PATH_MAX];
  const char *where = place(folder, path, whole);
  if (!where) return call(folder, path, flags, bits);
  struct stat found;
  int there = !fstatat(AT_FDCWD, where, &found, AT_SYMLINK_NOFOLLOW);
  int kind = ((flags & O_CREAT) && !there) || (flags & O_TRUNC) ? MAKE : LOOK;
  enum verdict verdict = judge(kind, where);
  if (verdict == FAIL) {
    errno = number;
    return -1;
  }
  enter();
  int fd = call(folder, path, flags, bits), kept = errno;
  if (fd >= 0 && fd < FDS) {
    pthread_mutex_lock(&lock);
    free(table[fd].path);
    table[fd].path = strdup(where);
    table[fd].handle = ++handles;
    pthread_mutex_unlock(&lock);
    note('O', table[fd].handle, flags, kind == MAKE, where, NULL, 0);
  }
  leave();
  if (verdict >= HALF_AND_DIE) die();
  errno = kept;
  return fd;
}

static int at_open(int folder, const char *path, int flags, mode_t bits) {
  REAL(openat);
  return real(folder, path, flags, bits);
}

#define MODE(flags) \
  mode_t bits = 0; \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { \
    va_list rest; \
    va_start(rest, flags); \
    bits = va_arg(rest, mode_t); \
    va_end(rest); \
  }

#define OPENED(folder, flags) return opened(at_open, folder, path, flags, bits)

int open(const char *path, int flags, ...) { MODE(flags) OPENED(AT_FDCWD, flags); }
int open64(const char *path, int flags, ...) { MODE(flags) OPENED(AT_FDCWD, flags | O_LARGEFILE); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) OPENED(folder, flags); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) OPENED(folder, flags | O_LARGEFILE); }
int creat(const char *path, mode_t bits) { OPENED(AT_FDCWD, O_CREAT | O_WRONLY | O_TRUNC); }
int creat64(const char *path, mode_t bits) { OPENED(AT_FDCWD, O_CREAT | O_WRONLY | O_TRUNC | O_LARGEFILE); }
/* What fortified builds call. */
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags); }
int __openat64_2(int folder, const char *path, int flags) { return openat64(folder, path, flags); }

int close(int fd) {
  REAL(close);
  if (path_of(fd)) {
    pthread_mutex_lock(&lock);
    free(table[fd].path);
    table[fd].path = NULL;
    pthread_mutex_unlock(&lock);
  }
  return real(fd);
}

/* -- bytes --------------------------------------------------------------------------------------------------------- */

static ssize_t written(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64);
  enum verdict verdict = judge(WRITE, table[fd].path);
  if (verdict == FAIL) {
    errno = number;
    return -1;
  }
  if (verdict == HALF || verdict == HALF_AND_DIE) size = size > 1 ? size / 2 : size;
  enter();
  int streaming = offset < 0;
  if (streaming) offset = lseek64(fd, 0, SEEK_CUR);
  ssize_t wrote = real(fd, data, size, offset);
  int kept = errno;
  if (wrote > 0) {
    if (streaming) lseek64(fd, offset + wrote, SEEK_SET);
    note('W', table[fd].handle, offset, wrote, NULL, data, wrote);
  }
  leave();
  if (verdict >= HALF_AND_DIE) die();
  errno = kept;
  return wrote;
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  return path_of(fd) ? written(fd, data, size, -1) : real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(pwrite);
  return path_of(fd) ? written(fd, data, size, offset) : real(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64);
  return path_of(fd) ? written(fd, data, size, offset) : real(fd, data, size, offset);
}

/* A legal short write: the first part alone. */
ssize_t writev(int fd, const struct iovec *parts, int parts_number) {
  REAL(writev);
  if (!path_of(fd) || parts_number < 1) return real(fd, parts, parts_number);
  return written(fd, parts[0].iov_base, parts[0].iov_len, -1);
}

#define READING(call) \
  if (path_of(fd)) { \
    enum verdict verdict = judge(READ, table[fd].path); \
    if (verdict == FAIL) { \
      errno = number; \
      return -1; \
    } \
    if (verdict >= HALF_AND_DIE) die(); \
  } \
  return call

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  READING(real(fd, data, size));
}

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  REAL(pread);
  READING(real(fd, data, size, offset));
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
  REAL(pread64);
  READING(real(fd, data, size, offset));
}

ssize_t readv(int fd, const struct iovec *parts, int parts_number) {
  REAL(readv);
  READING(real(fd, parts, parts_number));
}

/* -- durability, names and lengths --------------------------------------------------------------------------------- */

#define SYNCED(result) note('S', table[fd].handle, result == -2 ? -1 : result, 0, NULL, NULL, 0)
int fsync(int fd) {
  REAL(fsync);
  if (!path_of(fd)) return real(fd);
  PLAIN(SYNC, table[fd].path, real(fd), SYNCED);
}

int fdatasync(int fd) {
  REAL(fdatasync);
  if (!path_of(fd)) return real(fd);
  PLAIN(SYNC, table[fd].path, real(fd), SYNCED);
}

#define LENGTH(result) if (result == 0) note('T', table[fd].handle, length, 0, NULL, NULL, 0)
int ftruncate(int fd, off_t length) {
  REAL(ftruncate);
  if (!path_of(fd)) return real(fd, length);
  PLAIN(CUT, table[fd].path, real(fd, length), LENGTH);
}

int ftruncate64(int fd, off64_t length) {
  REAL(ftruncate64);
  if (!path_of(fd)) return real(fd, length);
  PLAIN(CUT, table[fd].path, real(fd, length), LENGTH);
}

#define RENAMED(result) if (result == 0) note('R', 0, 0, 0, from, to, strlen(to))
int renameat(int old_folder, const char *old, int new_folder, const char *new) {
  REAL(renameat);
  char first[PATH_MAX], second[PATH_MAX];
  const char *from = place(old_folder, old, first), *to = place(new_folder, new, second);
  if (!from || !to) return real(old_folder, old, new_folder, new);
  PLAIN(RENAME, to, real(old_folder, old, new_folder, new), RENAMED);
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

#define GONE(result) if (result == 0) note(flags & AT_REMOVEDIR ? 'D' : 'U', 0, 0, 0, where, NULL, 0)
int unlinkat(int folder, const char *path, int flags) {
  REAL(unlinkat);
  char whole[PATH_MAX];
  const char *where = place(folder, path, whole);
  struct stat found;
  if (!where || fstatat(AT_FDCWD, where, &found, AT_SYMLINK_NOFOLLOW)) return real(folder, path, flags);
  PLAIN(UNLINK, where, real(folder, path, flags), GONE);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

#define MADE(result) if (result == 0) note('M', 0, 0, 0, where, NULL, 0)
int mkdirat(int folder, const char *path, mode_t bits) {
  REAL(mkdirat);
  char whole[PATH_MAX];
  const char *where = place(folder, path, whole);
  struct stat found;
  if (!where || !fstatat(AT_FDCWD, where, &found, AT_SYMLINK_NOFOLLOW)) return real(folder, path, bits);
  PLAIN(FOLDER, where, real(folder, path, bits), MADE);
}

int mkdir(const char *path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }
