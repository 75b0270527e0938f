// Keys and values of prompts, with all that precedes them, from the paged cache into the tiles that flash.cu reads: for
// KEYS tokens of one sequence and one head, D / 64 parts of KEYS rows of 128 bytes, 16-byte units of row m exchanged by
// m mod 8 (the 128-byte swizzle of shared memory). Rows past the sequence's end are zero.
//
// One block a tile and a head. Macros: D 64 | 128; KEYS = D; BF16; KV as in rotate.cuh; BS: tokens of a cache block.

#define UNITS (D / 8)                                    // of 16 bytes in a row
#define THREADS 256
#define PASSES (KEYS * UNITS / THREADS)
#define UNROLL _Pragma("unroll")

// tables [sequences, table_width]; spans [tiles, 3]: row of `tables`, first token, tokens. Out: [tiles, kv_heads, key |
// value, KEYS D]. Grid: tiles, 2 kv_heads.
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const u8* cache, const void* scales, const int* tables, const int* spans, uint4* out, int table_width, int kv_heads) {
  pdl_launch_dependents();
  const int* span = spans + blockIdx.x * 3;
  const int head = blockIdx.y, unit = threadIdx.x % UNITS;
  const int* table = tables + (u64)span[0] * table_width;
  const int first = span[1], count = span[2];
  pdl_wait();
  uint4 v[PASSES];
#if KV
  float scale[PASSES];
#endif
  UNROLL for (int p = 0; p < PASSES; p++) {
    const int key = (p * THREADS + threadIdx.x) / UNITS;
    v[p] = make_uint4(0, 0, 0, 0);
#if KV
    scale[p] = 0.f;
#endif
    if (key >= count) continue;
    const u64 block = table[(first + key) / BS];
    const int offset = (first + key) % BS;
    const u64 at = (block * BS + offset) * 2 * kv_heads + head;
#if !KV
    v[p] = load_activations(cache + at * (D * 2) + unit * 16);
#else
    const uint2 codes = *(const uint2*)(cache + at * D + unit * 8);
    v[p].x = codes.x;
    v[p].y = codes.y;
    scale[p] = KV == 2 ? ((const float*)scales)[head]
                       : bf16_to_float(((const u16*)scales)[(block * 2 * kv_heads + head) * BS + offset]);
#endif
  }
  uint4* to = out + ((u64)(blockIdx.x * kv_heads + head % kv_heads) * 2 + head / kv_heads) * (KEYS * UNITS);
  UNROLL for (int p = 0; p < PASSES; p++) {
    const int key = (p * THREADS + threadIdx.x) / UNITS;
#if KV
    u32 pair[4];
    UNROLL for (int k = 0; k < 4; k++) {
      const u32 two = (k < 2 ? v[p].x : v[p].y) >> (16 * (k & 1));
      pair[k] = floats_to_acts((float)(signed char)two * scale[p], (float)(signed char)(two >> 8) * scale[p]);
    }
    v[p] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
#endif
    to[(unit >> 3) * (KEYS * 8) + key * 8 + ((unit & 7) ^ (key & 7))] = v[p];
  }
}
