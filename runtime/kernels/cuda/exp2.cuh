// Powers of two by the hardware's own instruction, and the soft cap of attention scores that is made of them.

DEVICE float exp2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// cap tanh(x / cap). tanh y = 1 - 2 / (exp(2 y) + 1), which is right at both ends too.
DEVICE float soft_capped(float x, float cap) {
  return cap - __fdividef(2.f * cap, exp2(x * (2.88539008f / cap)) + 1.f);   // 2 / ln 2
}
