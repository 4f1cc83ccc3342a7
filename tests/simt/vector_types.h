// SPDX-License-Identifier: MIT
// CUDA's vector types with CUDA's alignments, and dim3, for the simulator (see simt.h).
#ifndef SIMT_VECTOR_TYPES_H
#define SIMT_VECTOR_TYPES_H

#define SIMT_VECTOR2(name, type, alignment)                                                        \
    struct __attribute__((aligned(alignment))) name { type x, y; };                                \
    static inline name make_##name(type x, type y) { name v = {x, y}; return v; }
#define SIMT_VECTOR3(name, type)                                                                   \
    struct name { type x, y, z; };                                                                 \
    static inline name make_##name(type x, type y, type z) { name v = {x, y, z}; return v; }
#define SIMT_VECTOR4(name, type, alignment)                                                        \
    struct __attribute__((aligned(alignment))) name { type x, y, z, w; };                          \
    static inline name make_##name(type x, type y, type z, type w) { name v = {x, y, z, w}; return v; }

SIMT_VECTOR2(char2, signed char, 2)      SIMT_VECTOR4(char4, signed char, 4)
SIMT_VECTOR2(uchar2, unsigned char, 2)   SIMT_VECTOR4(uchar4, unsigned char, 4)
SIMT_VECTOR2(short2, short, 4)           SIMT_VECTOR4(short4, short, 8)
SIMT_VECTOR2(ushort2, unsigned short, 4) SIMT_VECTOR4(ushort4, unsigned short, 8)
SIMT_VECTOR2(int2, int, 8)               SIMT_VECTOR3(int3, int)       SIMT_VECTOR4(int4, int, 16)
SIMT_VECTOR2(uint2, unsigned, 8)         SIMT_VECTOR3(uint3, unsigned) SIMT_VECTOR4(uint4, unsigned, 16)
SIMT_VECTOR2(float2, float, 8)           SIMT_VECTOR3(float3, float)   SIMT_VECTOR4(float4, float, 16)
SIMT_VECTOR2(longlong2, long long, 16)
SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SIMT_VECTOR2(double2, double, 16)

#undef SIMT_VECTOR2
#undef SIMT_VECTOR3
#undef SIMT_VECTOR4

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

#endif
