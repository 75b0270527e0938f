// The gated activation, of gate and up as they are stored in 16 bits.

DEVICE float gated(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }   // silu(gate) * up
