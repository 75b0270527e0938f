// Attention of one new token a sequence over the paged KV cache, with all that comes before it: norms and rotation of
// queries and key, and the write of key and value into the cache.
//
// A block serves one KV head of one sequence, the G query heads that share it (grouped-query packing), and one share of
// the context (split-KV, flash-decoding). Each warp walks over units of 16 NT tokens. Keys and values go from memory
// straight into registers as operands of the tensor cores: scores are 16 query heads (G of them real) times 8 tokens, keys
// being the B operand; sums are 16 dims times 8 heads, values being the A operand and probabilities, as they come out of
// the scores, the B operand. Dims are contracted in the order in which 16-byte loads bring them, and stored in the order that
// results. Of several shares, the block that ends last adds up all, in order, so results do not depend on timing.
//
// Macros: those of rotate.cuh; G: query heads of a KV head, at most 16; BS: tokens of a cache block, a multiple of 16; NT;
//   WARPS; MINB: blocks an SM must hold. Grid: KV heads, shares (at most MAX_SHARES), sequences.

#define MAX_SHARES 32
#define UNROLL _Pragma("unroll")
#define MMA_BF16 (BF16 && !KV)                           // codes are exact in float16, and cheap to bring there
#define UNIT (16 * NT)
#define ROWS (G > 8 ? 2 : 1)                             // runs of 8 heads
#define LDQ (D + 32)                                     // of queries in shared memory: no bank conflicts
#define CHUNKS (D / 64)
#define K_LOADS (KV ? D / 64 : D / 32)                   // 16-byte loads of a lane for 8 tokens
#if KV
#define V_SHIFT 256.f                                    // keeps probability times scale within float16
typedef uint2 Values;                                    // 8 dims
#else
#define V_SHIFT 1.f
typedef uint4 Values;
#endif
#define MINUS_INFINITY __int_as_float(0xff800000)

DEVICE u32 operand(float low, float high) {
  u32 r;
#if MMA_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if MMA_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE float exp2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE uint4 load16(const void* p) {
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
DEVICE void load_values(const u8* p, uint4& r) { r = load16(p); }
DEVICE void load_values(const u8* p, uint2& r) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p) : "memory");
}
// A token's scale, as it is loaded: it becomes a number where it is used, since whatever is done with it beside its load
// would wait for the memory there.
#if KV == 1
typedef u16 Scale;
DEVICE float scale_value(u16 scale) { return bf16_to_float(scale); }
#else
typedef float Scale;
DEVICE float scale_value(float scale) { return scale; }
#endif
DEVICE float load_partial(const float* p) {
  float r; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory"); return r;
}
// Bytes 0, 1 (or 2, 3) of codes with their sign flipped, as two float16.
DEVICE u32 codes_low(u32 flipped) { return half_sub2(__byte_perm(flipped, 0x64646464u, 0x4140), 0x64806480u); }
DEVICE u32 codes_high(u32 flipped) { return half_sub2(__byte_perm(flipped, 0x64646464u, 0x4342), 0x64806480u); }

// qkv: [sequences, (heads + 2 kv_heads) D]. positions: of the new tokens; negative: no sequence, the output is zero.
// tables: [sequences, table_width] cache blocks. partial: floats for every share of every KV head of every sequence, G (D + 2)
// each; counters: one a KV head of a sequence, zero before and after. window: tokens seen, 0: all. factor: of the scores,
// times log2 e.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB)
decode_attention(const u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, u8* cache,
                 void* scales, const int* positions, const int* tables, u16* out, float* partial, u32* counters,
                 int table_width, int window, float factor, float eps) {
  pdl_launch_dependents();
  extern __shared__ __align__(16) u8 shared[];
  u16* queries = (u16*)shared;                           // [8 ROWS][LDQ]
  float* results = (float*)(shared + 8 * ROWS * LDQ * 2);   // [WARPS][G][D]
  __shared__ float peaks[WARPS][16], sums[WARPS][16];
  __shared__ float weights[MAX_SHARES * G], totals[MAX_SHARES * G];   // of the shares
  __shared__ u32 arrived;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.x, kv_heads = gridDim.x, share = blockIdx.y, sequence = blockIdx.z;
  const int heads = kv_heads * G;
  u16* mine = out + ((u64)sequence * heads + kv_head * G) * D;
  const int position = positions[sequence];
  if (position < 0) {
    pdl_wait();
    for (int i = threadIdx.x; share == 0 && i < G * D; i += WARPS * 32) mine[i] = 0;
    return;
  }
  const int first = window > 0 ? max(0, position + 1 - window) : 0;
  const int first_unit = first / UNIT, units = position / UNIT + 1 - first_unit;
  const int per_share = max((units + (int)gridDim.y - 1) / (int)gridDim.y, WARPS);
  const int shares = (units + per_share - 1) / per_share;
  if (share >= shares) {
    pdl_wait();
    return;
  }
  const int begin = first_unit + share * per_share, end = min(begin + per_share, first_unit + units);
  const int* table = tables + (u64)sequence * table_width;

  const u32 token_bytes = 2 * kv_heads * KV_BYTES;
  const u8* keys_of = cache + (u64)kv_head * KV_BYTES + g * token_bytes + t * 16;
  const u8* values_of = cache + (u64)(kv_head + kv_heads) * KV_BYTES + 2 * t * token_bytes + g * (KV ? 8 : 16);
  // Of 16 tokens; those past the end of the sequence repeat the last ones, and are masked.
  auto tile_of = [&](int unit, int n) { return min(unit * NT + n, position >> 4); };
  auto load_blocks = [&](int (&to)[NT], int unit) {
    UNROLL for (int n = 0; n < NT; n++) to[n] = table[tile_of(unit, n) * 16 / BS];
  };
  auto slot_of = [&](int unit, int block, int n) { return (u64)block * BS + tile_of(unit, n) * 16 % BS; };

  uint4 k[NT][2][K_LOADS];
  Values v[NT][4][CHUNKS];                               // tokens 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
#if KV
  Scale k_scale[NT][4], v_scale[NT][4];                  // of these tokens
  auto load_scales = [&](Scale (&to)[4], u64 slot, int head) {
    UNROLL for (int i = 0; i < 4; i++)
      to[i] = ((const Scale*)scales)[KV == 1 ? (slot + 2 * t + (i & 1) + (i >> 1) * 8) * 2 * kv_heads + head : head];
  };
#endif
  auto load_keys = [&](int unit, const int (&blocks)[NT]) {
    UNROLL for (int n = 0; n < NT; n++) {
      const u64 slot = slot_of(unit, blocks[n], n);
      const u8* at = keys_of + slot * token_bytes;
      UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int i = 0; i < K_LOADS; i++) k[n][m][i] = load16(at + m * 8 * token_bytes + i * 64);
#if KV
      load_scales(k_scale[n], slot, kv_head);
#endif
    }
  };
  auto load_v = [&](int unit, const int (&blocks)[NT]) {
    UNROLL for (int n = 0; n < NT; n++) {
      const u64 slot = slot_of(unit, blocks[n], n);
      const u8* at = values_of + slot * token_bytes;
      UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int c = 0; c < CHUNKS; c++)
          load_values(at + ((i & 1) + (i >> 1) * 8) * token_bytes + c * (KV ? 64 : 128), v[n][i][c]);
#if KV
      load_scales(v_scale[n], slot, kv_heads + kv_head);
#endif
    }
  };

  // Positions, tables, rotations and all tokens but the new one were there before this step began: reading them need not
  // wait for the kernel before us. (A step begins with kernels that are not launched early, the embedding's for one, so
  // nothing of the step before it is still running.)
  Rotation rotation;
  load_rotation(cos, sin, position, lane, rotation);
  int unit = begin + warp, blocks[NT], next_blocks[NT];  // of the unit to load, and the one after it
  if (unit < end) load_blocks(blocks, unit);
  if (unit + WARPS < end) load_blocks(next_blocks, unit + WARPS);
  const bool early = unit < end && unit * UNIT + UNIT <= position, late = unit < end && !early;
  if (early) {
    load_keys(unit, blocks);
    load_v(unit, blocks);
  }
  pdl_wait();

  const u16* row = qkv + (u64)sequence * (heads + 2 * kv_heads) * D;
  const int owner = share == shares - 1;                 // of the new token
  const int work = 8 * ROWS + 2 * owner;
  for (int i = warp; i < work; i += WARPS) {
    float v[PAIRS][4];
    if (i < 8 * ROWS) {
      UNROLL for (int p = 0; p < PAIRS; p++) UNROLL for (int k = 0; k < 4; k++) v[p][k] = 0.f;
      if (i < G)
        rotate_head(row + (kv_head * G + i) * D, q_norm, rotation, eps, lane, v);
      UNROLL for (int p = 0; p < PAIRS; p++) {
        const int d = dim_of(lane, p);
        if (d < D / 2) {
          *(u32*)(queries + i * LDQ + d) = operand(v[p][0] * factor, v[p][1] * factor);
          *(u32*)(queries + i * LDQ + d + D / 2) = operand(v[p][2] * factor, v[p][3] * factor);
        }
      }
    } else {
      const int values = i - 8 * ROWS, cached = kv_head + values * kv_heads;
      const u16* x = row + (heads + cached) * D;
      if (values) load_head(x, lane, v);
      else rotate_head(x, k_norm, rotation, eps, lane, v);
      const u64 slot = (u64)table[position / BS] * BS + position % BS;
      cache_head(cache, scales, slot * 2 * kv_heads + cached, cached, lane, v);
    }
  }
  __syncthreads();

  if (late) {                                            // the unit of the new token
    load_keys(unit, blocks);
    load_v(unit, blocks);
  }

  // o[r][c][w]: dims 64 c + 8 g + 2 w (elements 0, 1) and the one after it (2, 3) of heads 8 r + 2 t (0, 2) and 8 r + 2 t + 1.
  float peak[ROWS], sum[ROWS], o[ROWS][CHUNKS][4][4];
  UNROLL for (int r = 0; r < ROWS; r++) {
    peak[r] = MINUS_INFINITY;
    sum[r] = 0.f;
    UNROLL for (int c = 0; c < CHUNKS; c++)
      UNROLL for (int w = 0; w < 4; w++)
        UNROLL for (int e = 0; e < 4; e++) o[r][c][w][e] = 0.f;
  }

  for (; unit < end; unit += WARPS) {
    const int next = unit + WARPS;
    UNROLL for (int n = 0; n < NT; n++) blocks[n] = next_blocks[n];
    if (next + WARPS < end) load_blocks(next_blocks, next + WARPS);

    float s[NT][2][4];                                   // heads g (elements 0, 1) and g + 8; tokens 8 m + 2 t, and the next
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int e = 0; e < 4; e++) s[n][m][e] = 0.f;
    UNROLL for (int i = 0; i < K_LOADS; i++) {
#if KV                                                   // dims 64 i + 16 t ...: four steps of four dims a lane
      uint4 q[ROWS][2];
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int j = 0; j < 2; j++) q[r][j] = *(const uint4*)(queries + (g + 8 * r) * LDQ + i * 64 + t * 16 + j * 8);
      UNROLL for (int j = 0; j < 4; j++) {
        const u32 a0 = word(q[0][j >> 1], 2 * (j & 1)), a2 = word(q[0][j >> 1], 2 * (j & 1) + 1);
        const u32 a1 = ROWS > 1 ? word(q[ROWS - 1][j >> 1], 2 * (j & 1)) : 0;
        const u32 a3 = ROWS > 1 ? word(q[ROWS - 1][j >> 1], 2 * (j & 1) + 1) : 0;
        UNROLL for (int n = 0; n < NT; n++)
          UNROLL for (int m = 0; m < 2; m++) {
            const u32 flipped = word(k[n][m][i], j) ^ 0x80808080u;
            multiply(s[n][m], a0, a1, a2, a3, codes_low(flipped), codes_high(flipped));
          }
      }
#else                                                    // dims 32 i + 8 t ...: two steps of four dims a lane
      uint4 q[ROWS];
      UNROLL for (int r = 0; r < ROWS; r++) q[r] = *(const uint4*)(queries + (g + 8 * r) * LDQ + i * 32 + t * 8);
      UNROLL for (int j = 0; j < 2; j++) {
        const u32 a0 = word(q[0], 2 * j), a2 = word(q[0], 2 * j + 1);
        const u32 a1 = ROWS > 1 ? word(q[ROWS - 1], 2 * j) : 0, a3 = ROWS > 1 ? word(q[ROWS - 1], 2 * j + 1) : 0;
        UNROLL for (int n = 0; n < NT; n++)
          UNROLL for (int m = 0; m < 2; m++)
            multiply(s[n][m], a0, a1, a2, a3, word(k[n][m][i], 2 * j), word(k[n][m][i], 2 * j + 1));
      }
#endif
    }
#if KV
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int e = 0; e < 4; e++) s[n][m][e] *= scale_value(k_scale[n][2 * m + (e & 1)]);
#endif
    if (next < end) load_keys(next, blocks);

    if (unit * UNIT + UNIT - 1 > position || unit * UNIT < first)
      UNROLL for (int n = 0; n < NT; n++)
        UNROLL for (int m = 0; m < 2; m++)
          UNROLL for (int e = 0; e < 4; e++) {
            const int token = unit * UNIT + n * 16 + m * 8 + 2 * t + (e & 1);
            if (token > position || token < first) s[n][m][e] = MINUS_INFINITY;
            if (e < 2 && token > position) {             // 0 times what lies there must be 0, even if that is NaN
              UNROLL for (int c = 0; c < CHUNKS; c++) v[n][2 * m + e][c] = Values{};
#if KV
              v_scale[n][2 * m + e] = 0;
#endif
            }
          }
    u32 p[NT][ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++) {
      float top = MINUS_INFINITY;
      UNROLL for (int n = 0; n < NT; n++)
        UNROLL for (int m = 0; m < 2; m++) top = fmaxf(top, fmaxf(s[n][m][2 * r], s[n][m][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(top, peak[r]);
      if (__any_sync(0xffffffffu, top > peak[r])) {
        // 0 at first; where both are minus infinity there is nothing to shrink
        const float shrink = peak[r] == top ? 1.f : exp2(peak[r] - top);
        const float even = __shfl_sync(0xffffffffu, shrink, 8 * t), odd = __shfl_sync(0xffffffffu, shrink, 8 * t + 4);
        sum[r] *= shrink;
        UNROLL for (int c = 0; c < CHUNKS; c++)
          UNROLL for (int w = 0; w < 4; w++) {
            o[r][c][w][0] *= even;
            o[r][c][w][1] *= odd;
            o[r][c][w][2] *= even;
            o[r][c][w][3] *= odd;
          }
        peak[r] = top;
      }
      const float base = top == MINUS_INFINITY ? 0.f : top;
      UNROLL for (int n = 0; n < NT; n++) {
        float e[4];
        UNROLL for (int i = 0; i < 4; i++) {
          e[i] = exp2(s[n][i >> 1][2 * r + (i & 1)] - base);
          sum[r] += e[i];
#if KV
          e[i] *= scale_value(v_scale[n][i]) * V_SHIFT;
#endif
        }
        p[n][r][0] = operand(e[0], e[1]);
        p[n][r][1] = operand(e[2], e[3]);
      }
    }
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int c = 0; c < CHUNKS; c++) {
#if KV
        UNROLL for (int half = 0; half < 2; half++) {    // dims 4 half ... of the lane's 8
          u32 codes[4];
          UNROLL for (int i = 0; i < 4; i++) codes[i] = (half ? v[n][i][c].y : v[n][i][c].x) ^ 0x80808080u;
          UNROLL for (int j = 0; j < 2; j++) {           // bytes 2 j of both tokens, then bytes 2 j + 1
            const u32 low = __byte_perm(codes[0], codes[1], j ? 0x7362 : 0x5140);
            const u32 high = __byte_perm(codes[2], codes[3], j ? 0x7362 : 0x5140);
            const u32 a0 = codes_low(low), a1 = codes_high(low), a2 = codes_low(high), a3 = codes_high(high);
            UNROLL for (int r = 0; r < ROWS; r++) multiply(o[r][c][2 * half + j], a0, a1, a2, a3, p[n][r][0], p[n][r][1]);
          }
        }
#else
        UNROLL for (int w = 0; w < 4; w++) {
          const u32 v0 = word(v[n][0][c], w), v1 = word(v[n][1][c], w), v2 = word(v[n][2][c], w), v3 = word(v[n][3][c], w);
          const u32 a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
          const u32 a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
          UNROLL for (int r = 0; r < ROWS; r++) multiply(o[r][c][w], a0, a1, a2, a3, p[n][r][0], p[n][r][1]);
        }
#endif
      }
    if (next < end) load_v(next, blocks);
  }

  // Each warp has seen units of its own: bring their sums to one scale.
  UNROLL for (int r = 0; r < ROWS; r++) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    if (t == 0) { peaks[warp][g + 8 * r] = peak[r]; sums[warp][g + 8 * r] = sum[r]; }
    UNROLL for (int e = 0; e < 2; e++) {
      const int head = 8 * r + 2 * t + e;
      if (head < G)
        UNROLL for (int c = 0; c < CHUNKS; c++)
          UNROLL for (int w = 0; w < 4; w += 2)
            *(float4*)(results + (warp * G + head) * D + c * 64 + g * 8 + 2 * w) =
                make_float4(o[r][c][w][e], o[r][c][w][e + 2], o[r][c][w + 1][e], o[r][c][w + 1][e + 2]);
    }
  }
  __syncthreads();
  float* parts = partial + ((u64)sequence * kv_heads + kv_head) * gridDim.y * (G * (D + 2));
  float* part = parts + (u64)share * (G * (D + 2));      // G x D sums, then for each head its peak and its sum
  for (int i = threadIdx.x; i < G * D; i += WARPS * 32) {
    const int head = i / D;
    float top = MINUS_INFINITY, total = 0.f, value = 0.f;
    UNROLL for (int w = 0; w < WARPS; w++) top = fmaxf(top, peaks[w][head]);
    UNROLL for (int w = 0; w < WARPS; w++) {
      const float weight = exp2(peaks[w][head] - top);   // a warp without a tile: minus infinity, so nothing
      total += weight * sums[w][head];
      value += weight * results[w * G * D + i];
    }
    value *= 1.f / V_SHIFT;
    if (shares == 1) {
      mine[i] = float_to_act(value / total);
    } else {
      part[i] = value;
      if (i % D == 0) { part[G * D + 2 * head] = top; part[G * D + 2 * head + 1] = total; }
    }
  }
  if (shares == 1) return;
  __threadfence();
  __syncthreads();
  u32* counter = counters + sequence * kv_heads + kv_head;
  if (threadIdx.x == 0) arrived = atomicAdd(counter, 1u);
  __syncthreads();
  if (arrived != shares - 1) return;
  if (threadIdx.x == 0) *counter = 0;
  __threadfence();
  for (int i = threadIdx.x; i < shares * G; i += WARPS * 32) {   // all shares' scales at once, not one after another
    const float* other = parts + (u64)(i / G) * (G * (D + 2)) + G * D + 2 * (i % G);
    weights[i] = load_partial(other);
    totals[i] = load_partial(other + 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += WARPS * 32) {
    const int head = i / D;
    float top = MINUS_INFINITY, total = 0.f, value = 0.f;
    for (int n = 0; n < shares; n++) top = fmaxf(top, weights[n * G + head]);
#pragma unroll 8
    for (int n = 0; n < shares; n++) {
      const float weight = exp2(weights[n * G + head] - top);
      total += weight * totals[n * G + head];
      value += weight * load_partial(parts + (u64)n * (G * (D + 2)) + i);
    }
    mine[i] = float_to_act(value / total);
  }
}
