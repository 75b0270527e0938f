// Attention of one new token a sequence over the paged KV cache, with all that comes before it: norms and rotation of
// queries and key, and the write of key and value into the cache.
//
// A block serves one KV head of one sequence, the G query heads that share it (grouped-query packing), and one share of
// the context (split-KV, flash-decoding). Each warp walks over tiles of 16 tokens. Keys and values go from memory
// straight into registers as A operands of the tensor cores: scores are 16 tokens times 8 query heads (G of them real), sums
// are 16 dims times 8 heads, with probabilities, transposed, as the B operand. Dims are contracted in the order in which
// 16-byte loads bring them, and stored in the order that results. Of several shares, the block that ends last adds up all,
// in order, so results do not depend on timing.
//
// Macros: those of rotate.cuh; SOFT_CAP: scores have one; G: query heads of a KV head, at most 16; BS: tokens of a cache block, a multiple of 16; WARPS;
//   MINB: blocks an SM must hold. Grid: KV heads, shares (at most MAX_SHARES), sequences.

#define MAX_SHARES 32
#define UNROLL _Pragma("unroll")
#define MMA_BF16 (BF16 && !KV)                           // codes are exact in float16, and cheap to bring there
#define TILE 16                                          // tokens
#define ROWS (G > 8 ? 2 : 1)                             // runs of 8 heads
#define LDQ (D + 32)                                     // of queries in shared memory: no bank conflicts
#define K_LOADS (KV ? D / 64 : D / 32)                   // 16-byte loads of a lane for 8 tokens
#define V_SHIFT (KV ? 256.f : 1.f)                       // keeps probability times scale within float16
#if KV && D % 128
typedef uint2 Values;                                    // a lane's load of one token's value
#else
typedef uint4 Values;
#endif
#define V_BYTES ((int)sizeof(Values))
#define CHUNKS (KV_BYTES / (8 * V_BYTES))                // loads
#define V_DIMS (V_BYTES / (KV ? 1 : 2))                  // of a load
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
// An 8 x 8 matrix of 16-bit numbers, two neighbours of row lane / 4 in each lane, transposed.
DEVICE u32 transposed(u32 v) {
  u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r;
}
DEVICE uint4 load16(const void* p) {
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
DEVICE u32 word(const uint2& v, int i) { return i ? v.y : v.x; }
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
// each; counters: one a KV head of a sequence, zero before and after. least_tiles: of a share. window: tokens seen, 0: all.
// factor: of the scores, times log2 e; cap: of them (SOFT_CAP), times log2 e.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB)
decode_attention(const u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, u8* cache,
                 void* scales, const int* positions, const int* tables, u16* out, float* partial, u32* counters,
                 int table_width, int least_tiles, int window, float factor, float cap, float eps) {
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
  const int first_tile = first / TILE, tiles = position / TILE + 1 - first_tile;
  const int per_share = max((tiles + (int)gridDim.y - 1) / (int)gridDim.y, least_tiles);
  const int shares = (tiles + per_share - 1) / per_share;
  if (share >= shares) {
    pdl_wait();
    return;
  }
  const int begin = first_tile + share * per_share, end = min(begin + per_share, first_tile + tiles);
  const int* table = tables + (u64)sequence * table_width;

  const u32 token_bytes = 2 * kv_heads * KV_BYTES;
  const u8* keys_of = cache + (u64)kv_head * KV_BYTES + g * token_bytes + t * 16;
  const u8* values_of = cache + (u64)(kv_head + kv_heads) * KV_BYTES + 2 * t * token_bytes + g * V_BYTES;
  auto block_of = [&](int tile) { return table[tile * TILE / BS]; };
  auto offset_of = [&](int tile) { return tile * TILE % BS; };   // in its block

  uint4 k[2][K_LOADS];                                   // tokens g, g + 8
  Values v[4][CHUNKS];                                   // tokens 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
#if KV
  Scale k_scale[2], v_scale[2];                          // of tokens g, g + 8
  auto load_scales = [&](Scale (&to)[2], int block, int offset, int head) {
    UNROLL for (int i = 0; i < 2; i++)
      to[i] = ((const Scale*)scales)[KV == 1 ? ((u64)block * 2 * kv_heads + head) * BS + offset + g + 8 * i : head];
  };
#endif
  auto load_keys = [&](int tile, int block) {
    const u8* at = keys_of + ((u64)block * BS + offset_of(tile)) * token_bytes;
    UNROLL for (int m = 0; m < 2; m++)
      UNROLL for (int i = 0; i < K_LOADS; i++) k[m][i] = load16(at + m * 8 * token_bytes + i * 64);
#if KV
    load_scales(k_scale, block, offset_of(tile), kv_head);
#endif
  };
  auto load_v = [&](int tile, int block) {
    const u8* at = values_of + ((u64)block * BS + offset_of(tile)) * token_bytes;
    UNROLL for (int i = 0; i < 4; i++)
      UNROLL for (int c = 0; c < CHUNKS; c++)
        load_values(at + ((i & 1) + (i >> 1) * 8) * token_bytes + c * (8 * V_BYTES), v[i][c]);
#if KV
    load_scales(v_scale, block, offset_of(tile), kv_heads + kv_head);
#endif
  };

  // Positions, tables, rotations and all tokens but the new one were there before this step began: reading them need not
  // wait for the kernel before us. (A step begins with kernels that are not launched early, the embedding's for one, so
  // nothing of the step before it is still running.)
  Rotation rotation;
  load_rotation(cos, sin, position, lane, rotation);
  int tile = begin + warp, block = 0, next_block = 0;    // of the tile to load, and the one after it
  if (tile < end) block = block_of(tile);
  if (tile + WARPS < end) next_block = block_of(tile + WARPS);
  const bool early = tile < end && tile * TILE + TILE <= position, late = tile < end && !early;
  if (early) {
    load_keys(tile, block);
    load_v(tile, block);
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
      cache_head(cache, scales, table[position / BS], position % BS, cached, 2 * kv_heads, lane, v);
    }
  }
  __syncthreads();

  if (late) {                                            // the tile of the new token
    load_keys(tile, block);
    load_v(tile, block);
  }

  // o[r][c][w]: dims V_DIMS (8 c + g) + 2 w (elements 0, 1) and the one after it (2, 3) of heads 8 r + 2 t (0, 2) and
  // 8 r + 2 t + 1; peak[r] and sum[r]: of these heads.
  float peak[ROWS][2], sum[ROWS][2], o[ROWS][CHUNKS][V_DIMS / 2][4];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int e = 0; e < 2; e++) {
      peak[r][e] = MINUS_INFINITY;
      sum[r][e] = 0.f;
    }
    UNROLL for (int c = 0; c < CHUNKS; c++)
      UNROLL for (int w = 0; w < V_DIMS / 2; w++)
        UNROLL for (int e = 0; e < 4; e++) o[r][c][w][e] = 0.f;
  }

  for (; tile < end; tile += WARPS) {
    const int next = tile + WARPS;
    block = next_block;
    if (next + WARPS < end) next_block = block_of(next + WARPS);

    float s[ROWS][4];                                    // tokens g (elements 0, 1) and g + 8; heads 8 r + 2 t, and the next
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int e = 0; e < 4; e++) s[r][e] = 0.f;
    UNROLL for (int i = 0; i < K_LOADS; i++) {
      const int per_load = KV ? 16 : 8;                  // dims of a lane: four of them a step
      uint4 q[ROWS][KV ? 2 : 1];
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int j = 0; j < per_load / 8; j++)
          q[r][j] = *(const uint4*)(queries + (g + 8 * r) * LDQ + (i * 4 + t) * per_load + j * 8);
      UNROLL for (int j = 0; j < per_load / 4; j++) {
        u32 a[4];
        UNROLL for (int m = 0; m < 2; m++) {
#if KV
          const u32 flipped = word(k[m][i], j) ^ 0x80808080u;
          a[m] = codes_low(flipped);
          a[m + 2] = codes_high(flipped);
#else
          a[m] = word(k[m][i], 2 * j);
          a[m + 2] = word(k[m][i], 2 * j + 1);
#endif
        }
        UNROLL for (int r = 0; r < ROWS; r++)
          multiply(s[r], a[0], a[1], a[2], a[3], word(q[r][j >> 1], 2 * (j & 1)), word(q[r][j >> 1], 2 * (j & 1) + 1));
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int e = 0; e < 4; e++) {
#if KV
        s[r][e] *= scale_value(k_scale[e >> 1]);
#endif
#if SOFT_CAP
        s[r][e] = soft_capped(s[r][e], cap);
#endif
      }
    if (next < end) load_keys(next, block);

    if (tile * TILE + TILE - 1 > position || tile * TILE < first) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int token = tile * TILE + g + 8 * i;
        if (token <= position && token >= first) continue;
        UNROLL for (int r = 0; r < ROWS; r++) s[r][2 * i] = s[r][2 * i + 1] = MINUS_INFINITY;
#if KV
        if (token > position) v_scale[i] = 0;            // 0 times what lies there must be 0, even if that is NaN
#endif
      }
      UNROLL for (int i = 0; i < 4; i++)
        if (tile * TILE + 2 * t + (i & 1) + (i >> 1) * 8 > position)
          UNROLL for (int c = 0; c < CHUNKS; c++) v[i][c] = Values{};
    }
    u32 p[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++) {
      float top[2] = {fmaxf(s[r][0], s[r][2]), fmaxf(s[r][1], s[r][3])};
      if (__any_sync(0xffffffffu, top[0] > peak[r][0] || top[1] > peak[r][1])) {
        float shrink[2];
        UNROLL for (int e = 0; e < 2; e++) {
          top[e] = fmaxf(top[e], peak[r][e]);
          UNROLL for (int i = 4; i < 32; i <<= 1) top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], i));
          // 0 at first; where both are minus infinity there is nothing to shrink
          shrink[e] = peak[r][e] == top[e] ? 1.f : exp2(peak[r][e] - top[e]);
          sum[r][e] *= shrink[e];
          peak[r][e] = top[e];
        }
        UNROLL for (int c = 0; c < CHUNKS; c++)
          UNROLL for (int w = 0; w < V_DIMS / 2; w++)
            UNROLL for (int e = 0; e < 4; e++) o[r][c][w][e] *= shrink[e & 1];
      }
      float weight[4];
      UNROLL for (int e = 0; e < 4; e++) {
        weight[e] = exp2(s[r][e] - (peak[r][e & 1] == MINUS_INFINITY ? 0.f : peak[r][e & 1]));
        sum[r][e & 1] += weight[e];
#if KV
        weight[e] *= scale_value(v_scale[e >> 1]) * V_SHIFT;
#endif
      }
      p[r][0] = transposed(operand(weight[0], weight[1]));
      p[r][1] = transposed(operand(weight[2], weight[3]));
    }
    UNROLL for (int c = 0; c < CHUNKS; c++)
      UNROLL for (int w = 0; w < V_BYTES / 4; w++) {
#if KV                                                   // four dims of the lane
        u32 codes[4];
        UNROLL for (int i = 0; i < 4; i++) codes[i] = word(v[i][c], w) ^ 0x80808080u;
        UNROLL for (int j = 0; j < 2; j++) {             // bytes 2 j of both tokens, then bytes 2 j + 1
          const u32 low = __byte_perm(codes[0], codes[1], j ? 0x7362 : 0x5140);
          const u32 high = __byte_perm(codes[2], codes[3], j ? 0x7362 : 0x5140);
          const u32 a0 = codes_low(low), a1 = codes_high(low), a2 = codes_low(high), a3 = codes_high(high);
          UNROLL for (int r = 0; r < ROWS; r++) multiply(o[r][c][2 * w + j], a0, a1, a2, a3, p[r][0], p[r][1]);
        }
#else
        const u32 v0 = word(v[0][c], w), v1 = word(v[1][c], w), v2 = word(v[2][c], w), v3 = word(v[3][c], w);
        const u32 a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
        const u32 a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
        UNROLL for (int r = 0; r < ROWS; r++) multiply(o[r][c][w], a0, a1, a2, a3, p[r][0], p[r][1]);
#endif
      }
    if (next < end) load_v(next, block);
  }

  // Each warp has seen tiles of its own: bring their sums to one scale.
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int e = 0; e < 2; e++) {
      const int head = 8 * r + 2 * t + e;
      UNROLL for (int i = 4; i < 32; i <<= 1) sum[r][e] += __shfl_xor_sync(0xffffffffu, sum[r][e], i);
      if (g == 0) { peaks[warp][head] = peak[r][e]; sums[warp][head] = sum[r][e]; }
      if (head < G)
        UNROLL for (int c = 0; c < CHUNKS; c++)
          UNROLL for (int w = 0; w < V_DIMS / 2; w += 2)
            *(float4*)(results + (warp * G + head) * D + V_DIMS * (8 * c + g) + 2 * w) =
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
