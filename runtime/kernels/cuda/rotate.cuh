// Rotary positions and the paged KV cache, shared by the attention kernels. Follows common.cuh.
// Macros: D: head size, a multiple of 64; BF16; QK_NORM; KV: 0: cached in the activations' type, 1: int8 with a bfloat16
//   scale a token and head, 2: int8 with a float scale a head (kv_cache.py); BS: tokens of a cache block.

#define PAIRS ((D / 4 + 31) / 32)                        // of a lane: dims d, d + 1, d + D / 2, d + D / 2 + 1
#define KV_BYTES (D * (KV ? 1 : 2))                      // of one head of one token

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
  return v;
}
DEVICE float warp_max(float v) {                         // of numbers that are not negative: they order as their bits do
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
}
DEVICE float rounded(float v) { return act_to_float(float_to_act(v)); }

// The first dim of pair p of a lane; the pair exists where it is below D / 2.
DEVICE int dim_of(int lane, int p) { return 2 * (lane + 32 * p); }

DEVICE void load_head(const u16* x, int lane, float (&v)[PAIRS][4]) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const int d = dim_of(lane, p);
    u32 low = 0, high = 0;
    if (d < D / 2) { low = *(const u32*)(x + d); high = *(const u32*)(x + d + D / 2); }
    v[p][0] = act_to_float(low & 0xffff); v[p][1] = act_to_float(low >> 16);
    v[p][2] = act_to_float(high & 0xffff); v[p][3] = act_to_float(high >> 16);
  }
}

// cos and sin of a lane's dims at one position, as in rope.rotation_table.
struct Rotation { float cos[PAIRS][4], sin[PAIRS][4]; };

DEVICE void load_rotation(const u16* cos, const u16* sin, u64 position, int lane, Rotation& to) {
  load_head(cos + position * D, lane, to.cos);
  load_head(sin + position * D, lane, to.sin);
}

// One head, normed over its dims (QK_NORM) and rotated: x cos + roll(x, D / 2) sin.
DEVICE void turn_head(const u16* norm, const Rotation& by, float eps, int lane, float (&v)[PAIRS][4]) {
#if QK_NORM
  float sum = 0.f;
#pragma unroll
  for (int p = 0; p < PAIRS; p++)
#pragma unroll
    for (int k = 0; k < 4; k++) sum += v[p][k] * v[p][k];
  const float inverse = rsqrtf(warp_sum(sum) / D + eps);
  float weight[PAIRS][4];
  load_head(norm, lane, weight);
#pragma unroll
  for (int p = 0; p < PAIRS; p++)
#pragma unroll
    for (int k = 0; k < 4; k++) v[p][k] = rounded(v[p][k] * inverse * weight[p][k]);
#endif
#pragma unroll
  for (int p = 0; p < PAIRS; p++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float low = v[p][k], high = v[p][k + 2];
      v[p][k] = low * by.cos[p][k] + high * by.sin[p][k];
      v[p][k + 2] = high * by.cos[p][k + 2] + low * by.sin[p][k + 2];
    }
}

DEVICE void rotate_head(const u16* x, const u16* norm, const Rotation& by, float eps, int lane, float (&v)[PAIRS][4]) {
  load_head(x, lane, v);
  turn_head(norm, by, eps, lane, v);
}

DEVICE void store_head(u16* to, int lane, const float (&v)[PAIRS][4]) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const int d = dim_of(lane, p);
    if (d < D / 2) {
      *(u32*)(to + d) = floats_to_acts(v[p][0], v[p][1]);
      *(u32*)(to + d + D / 2) = floats_to_acts(v[p][2], v[p][3]);
    }
  }
}

// One head (of `heads`, keys and values) of one token into the cache, at `offset` of a block. One warp.
DEVICE void cache_head(u8* cache, void* scales, int block, int offset, int head, int heads, int lane,
                       const float (&v)[PAIRS][4]) {
  u8* to = cache + (((u64)block * BS + offset) * heads + head) * KV_BYTES;
#if !KV
  store_head((u16*)to, lane, v);
#else
  float exact[PAIRS][4], scale, peak = 0.f;              // as it would be cached in 16 bits
#pragma unroll
  for (int p = 0; p < PAIRS; p++)
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const u32 pair = floats_to_acts(v[p][k], v[p][k + 1]);
      exact[p][k] = act_to_float(pair & 0xffff);
      exact[p][k + 1] = act_to_float(pair >> 16);
      peak = fmaxf(peak, fmaxf(fabsf(exact[p][k]), fabsf(exact[p][k + 1])));
    }
#if KV == 2
  scale = ((const float*)scales)[head];
#else
  u16 stored;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored) : "f"(__fdiv_rn(warp_max(peak), 127.f)));
  if (stored < 0x0080) stored = 0x0080;                  // the least normal bfloat16
  if (lane == 0) ((u16*)scales)[((u64)block * heads + head) * BS + offset] = stored;
  scale = bf16_to_float(stored);
#endif
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const int d = dim_of(lane, p);
    if (d < D / 2) {
      u32 codes[4];                                      // in the lowest byte: 1.5 x 2^23 added rounds, ties to even
#pragma unroll
      for (int k = 0; k < 4; k++)
        codes[k] = __float_as_uint(fminf(fmaxf(exact[p][k] * inverse, -127.f), 127.f) + 12582912.f);
      *(u16*)(to + d) = (u16)__byte_perm(codes[0], codes[1], 0x40);
      *(u16*)(to + d + D / 2) = (u16)__byte_perm(codes[2], codes[3], 0x40);
    }
  }
#endif
}
