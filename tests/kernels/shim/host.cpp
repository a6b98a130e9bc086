// Fibers, their meetings, guarded memory, and the programs' main.
#include "host.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef __ELF__
extern "C" __attribute__((weak)) char __start_shared_memory[], __stop_shared_memory[];  // of the linker; none where none is
#endif

namespace host {

unsigned current, group, groups;
void (*kernel)();

namespace {

constexpr size_t STACK = 1 << 16;

enum State { RUNNING, MEETING, AT_BARRIER, DONE };

struct Fiber {
  ucontext_t context;
  jmp_buf here;
  State state;
  bool started;
  const void* site;
  Kind kind;
  uint32_t mask, value, result;
  Product* product;
};

struct Buffer {
  char* begin;
  size_t bytes;
  bool output;
};

std::vector<Fiber> fibers;
std::vector<char*> stacks;
std::vector<Buffer> buffers;
jmp_buf scheduler;
ucontext_t home;

}  // namespace

char* memory(unsigned buffer) { return buffers[buffer].begin; }

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "thread %u of group %u: %s\n", current, group, what);
  exit(3);
}

void rest() {
  if (!_setjmp(fibers[current].here)) _longjmp(scheduler, 1);
}

uint32_t meet(Kind kind, uint32_t value, uint32_t mask, const void* site) {
  Fiber& own = fibers[current];
  own.kind = kind, own.value = value, own.mask = mask, own.site = site, own.state = MEETING;
  rest();
  return fibers[current].result;
}

void meet_for(Product* product, const void* site) {
  fibers[current].product = product;
  meet(PRODUCT, 0, 0, site);
}

void barrier(const void* site) {
  fibers[current].site = site;
  fibers[current].state = AT_BARRIER;
  rest();
}

void run_fiber() {
  kernel();
  fibers[current].state = DONE;
  _longjmp(scheduler, 1);
}

void resume(unsigned number) {
  current = number;
  Fiber& fiber = fibers[number];
  fiber.state = RUNNING;
  if (_setjmp(scheduler)) return;
  if (fibers[number].started) _longjmp(fibers[number].here, 1);
  fibers[number].started = true;
  setcontext(&fibers[number].context);
}

// Where Apple's simdgroups have their share of a matrix.
unsigned row_of(unsigned lane) { return (lane >> 4) * 4 + (lane >> 1) % 4; }
unsigned column_of(unsigned lane) { return (lane >> 3) % 2 * 4 + lane % 2 * 2; }

void multiply(unsigned first) {
  float a[8][8], b[8][8];
  for (unsigned i = 0; i < SIMD; i++) {
    const Product& own = *fibers[first + i].product;
    for (unsigned j = 0; j < 2; j++) a[row_of(i)][column_of(i) + j] = own.a[j], b[row_of(i)][column_of(i) + j] = own.b[j];
  }
  for (unsigned i = 0; i < SIMD; i++) {
    Product& own = *fibers[first + i].product;
    for (unsigned j = 0; j < 2; j++) {
      own.d[j] = own.c[j];
      for (unsigned k = 0; k < 8; k++) own.d[j] += a[row_of(i)][k] * b[k][column_of(i) + j];
    }
  }
}

void settle(unsigned first) {  // the meeting of a simdgroup whose lanes all wait
  for (unsigned i = first; i < first + SIMD; i++) {
    const Fiber &own = fibers[i], &other = fibers[first];
    current = i;
    if (own.site != other.site) fail("is at another collective than lane 0 of its simdgroup");
    if (own.kind != other.kind || own.mask != other.mask) fail("asks for another exchange than lane 0 of its simdgroup");
  }
  if (fibers[first].kind == PRODUCT) return multiply(first);
  uint32_t any = 0;
  for (unsigned i = 0; i < SIMD; i++) any |= fibers[first + i].value;
  for (unsigned i = 0; i < SIMD; i++) {
    Fiber& own = fibers[first + i];
    if (own.kind == ANY) {
      own.result = any;
      continue;
    }
    const unsigned from = own.kind == SWAP ? i ^ own.mask : i + 1;
    if (from >= SIMD && own.kind == SWAP) fail("exchanges with a lane outside its simdgroup");
    own.result = from < SIMD ? fibers[first + from].value : 0xDEADBEEFu;
  }
}

void run_group(unsigned threads) {
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.state = RUNNING, fiber.started = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i];
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &home;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (;;) {
    unsigned done = 0, waiting = 0;
    for (unsigned first = 0; first < threads; first += SIMD) {
      for (;;) {
        unsigned count[4] = {0, 0, 0, 0};
        for (unsigned i = first; i < first + SIMD; i++) {
          if (fibers[i].state == RUNNING) resume(i);
          count[fibers[i].state]++;
        }
        if (count[MEETING] && count[MEETING] < SIMD) {
          for (unsigned i = first; i < first + SIMD; i++) {
            if (fibers[i].state != MEETING) current = i;
          }
          fail("missed a collective that other lanes of its simdgroup came to");
        }
        if (!count[MEETING]) {
          done += count[DONE], waiting += count[AT_BARRIER];
          break;
        }
        settle(first);
        for (unsigned i = first; i < first + SIMD; i++) fibers[i].state = RUNNING;
      }
    }
    if (done == threads) return;
    if (waiting < threads) fail("a barrier that not all threads came to");
    for (unsigned i = 0; i < threads; i++) {
      if (fibers[i].site != fibers[0].site) fail("threads wait at different barriers");
      fibers[i].state = RUNNING;
    }
  }
}

// Memory above a page that can't be touched, into which a stack that is too small would grow.
char* above_guard(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  char* base = static_cast<char*>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
  if (base == MAP_FAILED) fail("out of memory");
  mprotect(base, page, PROT_NONE);
  return base + page;
}

// Memory whose last byte is the last before a page that can't be touched, and whose first follows one in the same way as
// far as its size allows; what lies between is checked afterwards.
char* guarded(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t whole = (bytes + page - 1) / page * page;
  char* base = static_cast<char*>(mmap(nullptr, whole + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
  if (base == MAP_FAILED) fail("out of memory");
  mprotect(base, page, PROT_NONE);
  mprotect(base + page + whole, page, PROT_NONE);
  memset(base + page, 0xA5, whole);
  return base + page + whole - bytes;
}

void check_slack(const Buffer& buffer) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t slack = (buffer.bytes + page - 1) / page * page - buffer.bytes;
  for (size_t i = 1; i <= slack; i++) {
    if (buffer.begin[-static_cast<long>(i)] != static_cast<char>(0xA5)) fail("wrote in front of a buffer");
  }
}

void check_alignment(const void* address, size_t size) {
  const char* at = static_cast<const char*>(address);
  for (const Buffer& buffer : buffers) {
    if (at >= buffer.begin && at < buffer.begin + buffer.bytes) {
      if ((at - buffer.begin) % size) fail("a vector at an odd address");
      return;
    }
  }
  fail("a vector outside every buffer");
}

int run(int count, char** arguments) {
  if (count != 3) return 2;
  groups = strtoul(arguments[1], nullptr, 10);
  const unsigned threads = strtoul(arguments[2], nullptr, 10);
  uint8_t output;
  while (fread(&output, 1, 1, stdin) == 1) {
    uint64_t bytes;
    if (fread(&bytes, 8, 1, stdin) != 1) return 2;
    Buffer buffer{guarded(bytes), bytes, output == 1};
    if (!output && fread(buffer.begin, 1, bytes, stdin) != bytes) return 2;
    buffers.push_back(buffer);
  }
  fibers.resize(threads);
  for (unsigned i = 0; i < threads; i++) stacks.push_back(above_guard(STACK));
  for (group = 0; group < groups; group++) {
#ifdef __ELF__
    memset(__start_shared_memory, 0xFF, __stop_shared_memory - __start_shared_memory);
#endif
    run_group(threads);
  }
  for (const Buffer& buffer : buffers) {
    check_slack(buffer);
    if (buffer.output) fwrite(buffer.begin, 1, buffer.bytes, stdout);
  }
  return 0;
}

}  // namespace host
