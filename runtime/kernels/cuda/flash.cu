// Attention of prompts, causal, with whatever context precedes them, on Hopper's warpgroup tensor cores: FlashAttention's
// online softmax (Dao et al. 2022, arXiv 2205.14135), scores of the next keys in flight while those before are made into
// weights (Shah et al. 2024, arXiv 2407.08608).
//
// A block takes 128 queries of one head, a warpgroup 64. A producer thread brings tiles of KEYS keys or values, which
// gather.cu has laid out, into a ring of STAGES; queries and weights are the A operands, from registers.
//
// Macros: D 64 | 128; KEYS = TOKENS = D; BF16; ACT_BITS 16; STAGES; SOFT_CAP: scores have one. After hopper.cuh.

#define UNROLL _Pragma("unroll")
#define TILE_BYTES (KEYS * D * 2)
#define THREADS 384
#define WARPS 8                                          // that multiply
#define HIDDEN __int_as_float(0xff800000)                // minus infinity

// qkv [tokens, (heads + 2 kv_heads) D], queries rotated; kv from gather.cu; tiles [n, 4]: sequence, first row of qkv, its
// position, queries; starts [sequences]: the tile in kv that holds a sequence's first keys. scale: of the scores, times
// log2 e; cap: of them (SOFT_CAP), times log2 e. Grid: heads, n.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash(const u16* qkv, const u8* kv, const int* tiles, const int* starts, u16* out, int heads, int kv_heads, int window,
      float scale, float cap) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ring = (u32)__cvta_generic_to_shared(shared);
  const u32 full_at = (u32)__cvta_generic_to_shared(full), empty_at = (u32)__cvta_generic_to_shared(empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, 1);
      barrier_init(empty_at + 8 * i, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int* tile = tiles + blockIdx.y * 4;
  const int head = blockIdx.x, kv_head = head / (heads / kv_heads);
  const int first_row = tile[1], first = tile[2], count = tile[3];
  const int begin = max(first - window + 1, 0) / KEYS, end = (first + count - 1) / KEYS + 1;
  int stage = 0, phase = 0;                              // of the next tile to copy, or to multiply by
  auto advance = [&]() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };

  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != WARPS * 32) return;
    const u8* from = kv + ((u64)starts[tile[0]] * kv_heads + kv_head) * 2 * TILE_BYTES;
    const u64 step = (u64)kv_heads * 2 * TILE_BYTES;
    auto copy = [&](int i, int value) {
      barrier_wait(empty_at + 8 * stage, phase ^ 1);
      barrier_expect(full_at + 8 * stage, TILE_BYTES);
      bulk_copy(ring + stage * TILE_BYTES, from + i * step + value * TILE_BYTES, TILE_BYTES, full_at + 8 * stage);
      advance();
    };
    pdl_wait();
    copy(begin, 0);
    for (int i = begin; i < end; i++) {
      if (i + 1 < end) copy(i + 1, 0);
      copy(i, 1);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int g = lane >> 2, t = lane & 3, low = warp * 16;  // rows low + g and low + g + 8 of the tile
  const int width = (heads + 2 * kv_heads) * D;
  const u16* query[2];
  UNROLL for (int r = 0; r < 2; r++)
    query[r] = qkv + (u64)(first_row + min(low + g + 8 * r, count - 1)) * width + head * D + t * 2;
  pdl_wait();
  u32 q[D / 16][4];
  UNROLL for (int s = 0; s < D / 16; s++)
    UNROLL for (int k = 0; k < 4; k++) q[s][k] = *(const u32*)(query[k & 1] + s * 16 + (k >> 1) * 8);
  float scores[KEYS / 8][4], sum[D / 8][4];
  u32 weights[KEYS / 16][4];
  float peak[2] = {HIDDEN, HIDDEN}, total[2] = {0.f, 0.f}, shrink[2];
  UNROLL for (int j = 0; j < D / 8; j++)
    UNROLL for (int k = 0; k < 4; k++) sum[j][k] = 0.f;

  // Descriptors: 128-byte swizzle, 1024 bytes from 8 rows to the next; of values also from 64 columns to the next.
  auto multiply_keys = [&]() {                           // scores = queries of this warpgroup times the next tile
    barrier_wait(full_at + 8 * stage, phase);
    wgmma_fence();
    const u64 keys = (u64)((ring + stage * TILE_BYTES) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    UNROLL for (int s = 0; s < D / 16; s++) {
      const u64 b = keys + ((s >> 2) * (KEYS * 8) + (s & 3) * 2);
      if (s == 0)
        wgmma<false>(scores, q[s], b);
      else
        wgmma<true>(scores, q[s], b);
    }
    wgmma_commit();
  };
  auto multiply_values = [&]() {                         // sum += weights times the next tile
    barrier_wait(full_at + 8 * stage, phase);
    wgmma_fence();
    const u64 values = (u64)((ring + stage * TILE_BYTES) >> 4) | ((u64)(KEYS * 8) << 16) | (64ull << 32) | (1ull << 62);
    UNROLL for (int s = 0; s < KEYS / 16; s++) wgmma<true, true>(sum, weights[s], values + s * 128);
    wgmma_commit();
  };
  auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(empty_at + 8 * stage);
  };
  const float factor = SOFT_CAP ? 1.f : scale;           // that scores still lack once they are softened
  auto soften = [&](int i) {                             // scores of key tile i to weights that are not yet normed
#if SOFT_CAP
    UNROLL for (int j = 0; j < KEYS / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) scores[j][k] = soft_capped(scores[j][k] * scale, cap);
#endif
    const int start = i * KEYS, position = first + low + g;
    if (start + KEYS - 1 > first + low || start <= first + low + 15 - window) {
      UNROLL for (int j = 0; j < KEYS / 8; j++)
        UNROLL for (int k = 0; k < 4; k++) {
          const int key = start + j * 8 + t * 2 + (k & 1), at = position + 8 * (k >> 1);
          if (key > at || key <= at - window) scores[j][k] = HIDDEN;
        }
    }
    UNROLL for (int r = 0; r < 2; r++) {
      float top = peak[r];
      UNROLL for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = top == HIDDEN ? 0.f : top * factor;
      shrink[r] = exp2(peak[r] * factor - base);
      peak[r] = top;
      float added = 0.f;
      UNROLL for (int j = 0; j < KEYS / 8; j++)
        UNROLL for (int k = 0; k < 2; k++) {
          float& s = scores[j][2 * r + k];
          s = exp2(s * factor - base);
          added += s;
        }
      total[r] = total[r] * shrink[r] + added;
    }
  };
  auto keep_weights = [&]() {                            // in 16 bits, as the A operand
    UNROLL for (int s = 0; s < KEYS / 16; s++)
      UNROLL for (int k = 0; k < 4; k++)
        weights[s][k] = floats_to_acts(scores[2 * s + (k >> 1)][2 * (k & 1)], scores[2 * s + (k >> 1)][2 * (k & 1) + 1]);
  };

  multiply_keys();
  wgmma_wait_for<0>(scores);
  release(stage);
  advance();
  soften(begin);
  keep_weights();
  for (int i = begin; i + 1 < end; i++) {
    const int keys_at = stage;
    multiply_keys();
    advance();
    const int values_at = stage;
    multiply_values();
    advance();
    wgmma_wait_for<1>(scores);
    release(keys_at);
    soften(i + 1);
    wgmma_wait_for<0>(sum);
    release(values_at);
    UNROLL for (int j = 0; j < D / 8; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[j][k] *= shrink[k >> 1];
    keep_weights();
  }
  multiply_values();
  wgmma_wait_for<0>(sum);

  UNROLL for (int r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    const float gain = total[r] > 0.f ? 1.f / total[r] : 0.f;
    const int row = low + g + 8 * r;
    if (row >= count) continue;
    u16* to = out + (u64)(first_row + row) * (heads * D) + head * D + t * 2;
    UNROLL for (int j = 0; j < D / 8; j++)
      *(u32*)(to + j * 8) = floats_to_acts(sum[j][2 * r] * gain, sum[j][2 * r + 1] * gain);
  }
}
