// Rotary positions for the tokens of prompts: queries are rotated in place, keys (rotated) and values go into the cache.
// One block a token, one warp a head at a time. Macros: those of rotate.cuh.

extern "C" __global__ void __launch_bounds__(256)
rotate(u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, u8* cache, void* scales,
       const int* positions, const int* slots, int heads, int kv_heads, float eps) {
  pdl_launch_dependents();
  const int token = blockIdx.x, lane = threadIdx.x & 31, all = heads + 2 * kv_heads;
  pdl_wait();
  const u64 position = positions[token], slot = slots[token];
  u16* row = qkv + (u64)token * all * D;
  Rotation rotation;
  load_rotation(cos, sin, position, lane, rotation);
  for (int head = threadIdx.x >> 5; head < all; head += 8) {
    float v[PAIRS][4];
    u16* x = row + head * D;
    const int cached = head - heads;                     // keys, then values, of the cache
    if (cached < kv_heads)
      rotate_head(x, cached < 0 ? q_norm : k_norm, rotation, eps, lane, v);
    else
      load_head(x, lane, v);
    if (cached < 0)
      store_head(x, lane, v);
    else
      cache_head(cache, scales, slot * 2 * kv_heads + cached, cached, lane, v);
  }
}
