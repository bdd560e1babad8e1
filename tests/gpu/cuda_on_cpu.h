// CUDA for one thread block on one thread of a CPU: what store.cu and project.h use, under the names of mma.h.
//
// Lanes are fibers.  They run one after another up to the next instruction that a warp or a block executes together
// (a product, a shuffle, a barrier), where each waits until all have come.  Rounding is the GPU's (halves are rounded once);
// products on the matrix unit add in another order.  Copies are immediate.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV inline
#define FULL 0xffffffffu
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
using std::max;
using std::min;

constexpr int SHARED = 1 << 18;
extern char smem[];

namespace cpu {
constexpr int THREADS = 256, STACK = 1 << 18;
struct Place { u32 x, y; };
struct Barrier { int arrived = 0; u64 round = 0; };
struct Lane { ucontext_t context; Place thread; bool done; std::vector<char> stack; };
inline Lane lanes[THREADS];
inline Barrier warps[THREADS / 32], block;
inline u32 box[THREADS][6];  // what each lane has brought to its warp
inline int current;
inline ucontext_t home;
inline Place block_index, grid_size;
inline std::function<void()> body;

inline void yield() {
  const int from = current;
  do current = (current + 1) % THREADS; while (lanes[current].done && current != from);
  if (current != from) swapcontext(&lanes[from].context, &lanes[current].context);
}
inline void wait(Barrier& barrier, int count) {
  const u64 round = barrier.round;
  if (++barrier.arrived == count) { barrier.arrived = 0; barrier.round++; return; }
  while (barrier.round == round) yield();
}
inline Barrier& warp() { return warps[current / 32]; }
inline u32 (*mine())[6] { return box + current / 32 * 32; }
inline void enter() {
  body();
  lanes[current].done = true;
  for (int i = 0; i < THREADS; i++)
    if (!lanes[i].done) { current = i; setcontext(&lanes[i].context); }
  setcontext(&home);
}
inline void run_block() {
  for (int i = 0; i < THREADS; i++) {
    Lane& lane = lanes[i];
    lane.stack.resize(STACK);
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, enter, 0);
    lane.thread = {(u32)i, 0};
    lane.done = false;
  }
  current = 0;
  swapcontext(&home, &lanes[0].context);
}
}  // namespace cpu
#define threadIdx (cpu::lanes[cpu::current].thread)
#define blockIdx cpu::block_index
#define gridDim cpu::grid_size

// ---- numbers ------------------------------------------------------------------------------------------
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float __fdividef(float a, float b) { return a / b; }
inline float half_value(u16 v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
inline u16 half_bits(double x) { const _Float16 h = (_Float16)x; u16 v; memcpy(&v, &h, 2); return v; }
inline float half_lo(u32 v) { return half_value((u16)v); }
inline float half_hi(u32 v) { return half_value((u16)(v >> 16)); }
inline u32 pack_half(float lo, float hi) { return half_bits(lo) | (u32)half_bits(hi) << 16; }
inline u32 pack_half_finite(float lo, float hi) { return pack_half(min(max(lo, -65504.f), 65504.f), min(max(hi, -65504.f), 65504.f)); }
#if ACT_BF16
inline float act_value(u16 v) { return __uint_as_float((u32)v << 16); }
#else
inline float act_value(u16 v) { return half_value(v); }
#endif
template <class F> u32 both(u32 a, u32 b, u32 c, F f) {
  u32 r = 0;
  for (int h = 0; h < 32; h += 16) r |= (u32)half_bits(f((double)half_value((u16)(a >> h)), (double)half_value((u16)(b >> h)), (double)half_value((u16)(c >> h)))) << h;
  return r;
}
inline u32 fma_half2(u32 a, u32 b, u32 c) { return both(a, b, c, [](double x, double y, double z) { return x * y + z; }); }
inline u32 fma_sat_half2(u32 a, u32 b, u32 c) { return both(a, b, c, [](double x, double y, double z) { return min(max(x * y + z, 0.0), 1.0); }); }
inline u32 add_half2(u32 a, u32 b) { return both(a, b, 0, [](double x, double y, double) { return x + y; }); }
inline u32 sub_half2(u32 a, u32 b) { return both(a, b, 0, [](double x, double y, double) { return x - y; }); }
inline u32 mul_half2(u32 a, u32 b) { return both(a, b, 0, [](double x, double y, double) { return x * y; }); }
inline u32 max_half2(u32 a, u32 b) { return both(a, b, 0, [](double x, double y, double) { return max(x, y); }); }
inline u32 abs_half2(u32 a) { return a & 0x7fff7fffu; }
inline int dot4(u32 a, u32 b, int c) {
  for (int h = 0; h < 32; h += 8) c += (int)(signed char)(a >> h) * (int)(signed char)(b >> h);
  return c;
}
inline u32 mad(u32 a, u32 b, u32 c) { return a * b + c; }
template <u32 V> u32 constant() { return V; }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
  const u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(u8)(bytes >> 8 * (s >> 4 * i & 7)) << 8 * i;
  return r;
}

// ---- together -----------------------------------------------------------------------------------------
inline void __syncthreads() { cpu::wait(cpu::block, cpu::THREADS); }
inline void __syncwarp() { cpu::wait(cpu::warp(), 32); }
inline u32 exchanged(u32 v, int from) {
  cpu::box[cpu::current][0] = v;
  __syncwarp();
  const u32 r = cpu::mine()[from][0];
  __syncwarp();
  return r;
}
inline u32 __shfl_sync(u32, u32 v, int from) { return exchanged(v, from & 31); }
inline u32 __shfl_xor_sync(u32, u32 v, int mask) { return exchanged(v, (cpu::current & 31) ^ mask); }
inline float __shfl_xor_sync(u32, float v, int mask) { return __uint_as_float(exchanged(__float_as_uint(v), (cpu::current & 31) ^ mask)); }
template <class F> void product(float (&d)[4], const u32 (&operands)[6], const float (&c)[4], F value) {
  memcpy(cpu::box[cpu::current], operands, sizeof operands);
  __syncwarp();
  const int g = (cpu::current & 31) / 4, q = cpu::current & 3;
  const u32(*in)[6] = cpu::mine();
  float r[4];
  for (int o = 0; o < 4; o++) {
    const int row = g + 8 * (o / 2), column = 2 * q + o % 2;
    double sum = c[o];
    for (int k = 0; k < 16; k++) {
      const u32 a = in[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], b = in[column * 4 + k % 8 / 2][4 + k / 8];
      sum += (double)value((u16)(a >> 16 * (k % 2))) * (double)value((u16)(b >> 16 * (k % 2)));
    }
    r[o] = (float)sum;
  }
  __syncwarp();
  memcpy(d, r, sizeof r);
}
inline void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float (&c)[4]) { product(d, {a0, a1, a2, a3, b0, b1}, c, half_value); }
inline void mma_act(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { product(d, {a0, a1, a2, a3, b0, b1}, d, act_value); }

// ---- memory -------------------------------------------------------------------------------------------
inline u32 smem_addr(const void* p) { return (u32)((const char*)p - smem); }
inline void copy16(u32 to, const void* from) { memcpy(smem + to, from, 16); }
inline void copy_commit() {}
template <int> void copy_wait() {}
template <class T> T loaded(const void* p) { T v; memcpy(&v, p, sizeof v); return v; }
inline uint2 lds64(u32 a) { return loaded<uint2>(smem + a); }
inline uint4 lds128(u32 a) { return loaded<uint4>(smem + a); }
inline uint4 ldg128(const void* p) { return loaded<uint4>(p); }
inline void wait_predecessor() {}
inline void release_successor() {}
