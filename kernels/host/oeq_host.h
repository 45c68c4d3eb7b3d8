// The CUDA built-ins that payloads use, for the host CPU: what stands before a payload's source when the system's C++
// compiler turns it into a shared library (src/compile/host.rs).
//
// A block's warps are independent of each other and run one after another. The lanes of a warp run in step at the warp's
// barriers: each has a stack of its own and gives the processor to the next one at a barrier, so one round of switches is
// one barrier. Between two barriers a lane runs by itself, which is what makes the code fast.
//
// All stacks of a warp lie in one region, aligned to its own size, that the caller provides. The warp's state is at the
// beginning of the region, so that any code finds it from its stack pointer: no thread-local data, no reserved register.
//
//   region                                                                          region + OEQ_HOST_REGION
//   | Warp ...        | guard, stack of lane 0 | guard, stack of lane 1 |  ...       |
//   0          OEQ_HOST_STACKS        + OEQ_HOST_STACK
//
// OEQ_HOST_REGION, OEQ_HOST_STACKS and OEQ_HOST_STACK, in bytes, come from the command line. Below each stack is a page
// that the caller has made inaccessible.

#if !defined(__x86_64__) || !defined(__LP64__)
#define OEQ_HOST_UCONTEXT 1
#endif
#ifdef OEQ_HOST_UCONTEXT
#include <ucontext.h>
#endif

typedef __SIZE_TYPE__ size_t;

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// `extern __shared__ T name[]` was rewritten before the compiler sees it.
#define OEQ_HOST_SHARED(type) ((type*)oeq_host::warp()->shared)

namespace oeq_host {

constexpr unsigned LANES = 32;

struct Dimensions {
    unsigned x, y, z;
};

struct Lane {
#ifdef OEQ_HOST_UCONTEXT
    ucontext_t context;
#else
    void* stack;
#endif
    // Its neighbours in the ring of lanes that have not ended.
    unsigned next, previous;
};

struct Warp {
    // The lane that runs.
    unsigned current;
    // Lanes that have not ended.
    unsigned alive;
    // Threads of the block that are in this warp, and the number of its first one.
    unsigned width, first;
    unsigned block, blocks, threads;
    void (*body)(void**);
    void** parameters;
    void* shared;
    // What lanes hand each other in a shuffle. Two sets in turn: a lane may begin the next shuffle while another still
    // reads from this one, but it cannot get to the one after that.
    unsigned turn[LANES];
    // Lanes that have come to the reduction that is under way.
    unsigned arrived;
    unsigned long long slots[2][LANES];
#ifdef OEQ_HOST_UCONTEXT
    ucontext_t caller;
#else
    void* caller;
#endif
    Lane lanes[LANES];
};

static_assert(sizeof(Warp) <= OEQ_HOST_STACKS, "a warp's state fits before its stacks");
static_assert(OEQ_HOST_STACKS + LANES * OEQ_HOST_STACK <= OEQ_HOST_REGION, "the stacks fit in the region");

static inline __attribute__((always_inline)) Warp* warp() {
#ifdef OEQ_HOST_UCONTEXT
    const size_t inside = (size_t)__builtin_frame_address(0);
#else
    size_t inside;
    // Not volatile: whatever the compiler makes of several of these, each lies in the region.
    asm("movq %%rsp, %0" : "=r"(inside));
#endif
    return (Warp*)(inside & ~(size_t)(OEQ_HOST_REGION - 1));
}

#ifdef OEQ_HOST_UCONTEXT
static inline void change(Lane* from, Lane* to) { swapcontext(&from->context, &to->context); }
#else
// Leaves its own place in `*from` and goes on where `to` was left. Everything that may live in a register is declared
// overwritten, so the compiler saves what it needs and nothing else. A jump and not a return: shadow stacks stay valid.
static inline __attribute__((always_inline)) void change(void** from, void* to) {
    asm volatile(
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rax\n\t"
        "pushq %%rax\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq %1, %%rsp\n\t"
        "popq %%rax\n\t"
        "jmpq *%%rax\n"
        "1:\n\t"
        "endbr64\n\t"
        "popq %%rbp\n\t"
        : "+D"(from), "+S"(to)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3",
          "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
#ifdef __AVX512F__
          "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28",
          "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
#endif
          "st", "st(1)", "st(2)", "st(3)", "st(4)", "st(5)", "st(6)", "st(7)", "cc", "memory");
}
#endif

// A barrier of the warp: every other lane comes as far as this before the caller goes on.
static inline __attribute__((always_inline)) void barrier() {
    Warp* const w = warp();
    Lane* const from = &w->lanes[w->current];
    Lane* const to = &w->lanes[from->next];
    if (to == from) return;
    w->current = from->next;
#ifdef OEQ_HOST_UCONTEXT
    change(from, to);
#else
    change(&from->stack, to->stack);
#endif
}

// Where a lane begins. It has no caller: at its end the next lane goes on, or whoever runs the block after the last one.
static void lane() {
    warp()->body(warp()->parameters);
    Warp* const w = warp();
    Lane* const self = &w->lanes[w->current];
    w->alive -= 1;
    const unsigned next = self->next;
    w->lanes[self->previous].next = next;
    w->lanes[next].previous = self->previous;
    w->current = next;
#ifdef OEQ_HOST_UCONTEXT
    setcontext(w->alive == 0 ? &w->caller : &w->lanes[next].context);
#else
    void* nowhere;
    change(&nowhere, w->alive == 0 ? w->caller : w->lanes[next].stack);
#endif
    __builtin_unreachable();
}

// Runs one block of the grid in a region.
static void run(void* region, void (*body)(void**), void** parameters, unsigned block, unsigned blocks, unsigned threads,
                void* shared) {
    Warp* const w = (Warp*)region;
    w->block = block;
    w->blocks = blocks;
    w->threads = threads;
    w->body = body;
    w->parameters = parameters;
    w->shared = shared;
    w->arrived = 0;
    for (unsigned first = 0; first < threads; first += LANES) {
        const unsigned width = threads - first < LANES ? threads - first : LANES;
        w->first = first;
        w->width = width;
        w->alive = width;
        w->current = 0;
        for (unsigned i = 0; i < width; i++) {
            Lane* const l = &w->lanes[i];
            l->next = i + 1 == width ? 0 : i + 1;
            l->previous = i == 0 ? width - 1 : i - 1;
            w->turn[i] = 0;
            char* const stack = (char*)region + OEQ_HOST_STACKS + i * (size_t)OEQ_HOST_STACK;
            // The tops are shifted against each other. At one distance of a power of two the lanes would all use the
            // same few lines of the cache.
            char* const top = stack + OEQ_HOST_STACK - 64 - i * 1088;
#ifdef OEQ_HOST_UCONTEXT
            getcontext(&l->context);
            l->context.uc_stack.ss_sp = stack;
            l->context.uc_stack.ss_size = (size_t)(top - stack);
            l->context.uc_link = nullptr;
            makecontext(&l->context, lane, 0);
#else
            // As if called: a return address of zero, where a debugger stops, at an odd multiple of 8.
            ((void**)top)[-1] = nullptr;
            ((void**)top)[-2] = (void*)lane;
            l->stack = (void**)top - 2;
#endif
        }
#ifdef OEQ_HOST_UCONTEXT
        swapcontext(&w->caller, &w->lanes[0].context);
#else
        change(&w->caller, w->lanes[0].stack);
#endif
    }
}

static inline Dimensions thread_index() {
    Warp* const w = warp();
    return {w->first + w->current, 0, 0};
}
static inline Dimensions block_index() { return {warp()->block, 0, 0}; }
static inline Dimensions block_dimensions() { return {warp()->threads, 1, 1}; }
static inline Dimensions grid_dimensions() { return {warp()->blocks, 1, 1}; }

// The value of the lane that is `distance` above the caller, and the caller's own where there is none.
template <typename T>
static inline __attribute__((always_inline)) T shuffle_down(T value, unsigned distance) {
    static_assert(sizeof(T) <= sizeof(unsigned long long), "a shuffled value fits in a slot");
    const unsigned self = warp()->current;
    const unsigned turn = warp()->turn[self];
    warp()->turn[self] = turn ^ 1;
    __builtin_memcpy(&warp()->slots[turn][self], &value, sizeof(T));
    barrier();
    if (self + distance < warp()->width) __builtin_memcpy(&value, &warp()->slots[turn][self + distance], sizeof(T));
    return value;
}

// What is left in `value` by the loop
//     for (int offset = 16; offset > 0; offset /= 2) value += shuffle_down(value, offset);
// to the last bit and for every lane, at the price of one barrier: the lane that comes last does the additions of all.
template <typename T>
static inline __attribute__((always_inline)) T sum_down(T value) {
    static_assert(sizeof(T) <= sizeof(unsigned long long), "a shuffled value fits in a slot");
    Warp* const w = warp();
    const unsigned self = w->current;
    const unsigned turn = w->turn[self];
    w->turn[self] = turn ^ 1;
    T* const values = (T*)w->slots[turn];
    values[self] = value;
    if (++w->arrived == w->alive) {
        w->arrived = 0;
        for (unsigned offset = LANES / 2; offset > 0; offset /= 2) {
            // A lane's neighbour has a higher number, so upwards all are read before they change.
            const unsigned inside = w->width > offset ? w->width - offset : 0;
            for (unsigned i = 0; i < inside; i++) values[i] += values[i + offset];
            for (unsigned i = inside; i < w->width; i++) values[i] += values[i];
        }
    }
    barrier();
    return ((T*)warp()->slots[turn])[self];
}

template <typename T, typename Bits>
static inline T add(T* address, T value) {
    Bits* const bits = (Bits*)address;
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
    for (;;) {
        T old;
        __builtin_memcpy(&old, &before, sizeof(T));
        const T sum = old + value;
        Bits after;
        __builtin_memcpy(&after, &sum, sizeof(T));
        if (__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
    }
}

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I>
struct Count<0, I...> {
    using Type = Indices<I...>;
};

template <typename... P, size_t... I>
static inline __attribute__((always_inline)) void call(void (*kernel)(P...), void** parameters, Indices<I...>) {
    kernel(*(P*)parameters[I]...);
}
// Calls a kernel with the values that its parameters' pointers point to.
template <typename... P>
static inline __attribute__((always_inline)) void call(void (*kernel)(P...), void** parameters) {
    call(kernel, parameters, typename Count<sizeof...(P)>::Type());
}

}  // namespace oeq_host

#define threadIdx (oeq_host::thread_index())
#define blockIdx (oeq_host::block_index())
#define blockDim (oeq_host::block_dimensions())
#define gridDim (oeq_host::grid_dimensions())
#define warpSize 32

static inline __attribute__((always_inline)) void __syncwarp(unsigned = 0xffffffffu) { oeq_host::barrier(); }
template <typename T>
static inline __attribute__((always_inline)) T __shfl_down_sync(unsigned, T value, unsigned distance) {
    return oeq_host::shuffle_down(value, distance);
}
static inline float atomicAdd(float* address, float value) { return oeq_host::add<float, unsigned>(address, value); }
static inline double atomicAdd(double* address, double value) {
    return oeq_host::add<double, unsigned long long>(address, value);
}
template <typename A, typename B>
static inline constexpr auto min(A a, B b) -> decltype(a + b) {
    return b < a ? b : a;
}
template <typename A, typename B>
static inline constexpr auto max(A a, B b) -> decltype(a + b) {
    return a < b ? b : a;
}

// One exported function for each entry point: `symbol` runs a block of `kernel`.
#define OEQ_HOST_EXPORT(symbol, kernel)                                                                                  \
    static void symbol##_lane(void** parameters) { oeq_host::call(kernel, parameters); }                                 \
    extern "C" __attribute__((visibility("default"))) void symbol(void* region, void** parameters, unsigned block,       \
                                                                  unsigned blocks, unsigned threads, void* shared) {     \
        oeq_host::run(region, symbol##_lane, parameters, block, blocks, threads, shared);                                \
    }
