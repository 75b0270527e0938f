// Rotary positions for the tokens of prompts: queries are rotated in place, keys (rotated) and values go into the cache.
// One block a token, one warp a head at a time. Macros: those of rotate.cuh.

#define TOGETHER (PAIRS == 1 ? 4 : 2)                    // heads of a warp

extern "C" __global__ void __launch_bounds__(256)
rotate(u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, u8* cache, void* scales,
       const int* positions, const int* slots, int heads, int kv_heads, float eps) {
  pdl_launch_dependents();
  const int token = blockIdx.x, lane = threadIdx.x & 31, all = heads + 2 * kv_heads;
  pdl_wait();
  const u64 position = positions[token];
  const int slot = slots[token];
  u16* row = qkv + (u64)token * all * D;
  Rotation rotation;
  load_rotation(cos, sin, position, lane, rotation);
  for (int first = threadIdx.x >> 5; first < all; first += 8 * TOGETHER) {
    float v[TOGETHER][PAIRS][4];                         // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      if (first + 8 * i < all) load_head(row + (first + 8 * i) * D, lane, v[i]);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const int head = first + 8 * i, cached = head - heads;  // keys, then values, of the cache
      if (head >= all) break;
      if (cached < kv_heads) turn_head(cached < 0 ? q_norm : k_norm, rotation, eps, lane, v[i]);
      if (cached < 0)
        store_head(row + head * D, lane, v[i]);
      else
        cache_head(cache, scales, slot / BS, slot % BS, cached, 2 * kv_heads, lane, v[i]);
    }
  }
}
