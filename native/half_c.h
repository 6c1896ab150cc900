/* Put in front of mlx-c's headers when bindings are generated: C sees both half types as their bits.
   Keeps mlx-c's own half.h out, which knows them on Arm only. */
#ifndef GREENROOM_HALF_C_H
#define GREENROOM_HALF_C_H
#define MLX_HALF_H
#define HAS_FLOAT16
#define HAS_BFLOAT16
typedef unsigned short float16_t;
typedef unsigned short bfloat16_t;
#endif
