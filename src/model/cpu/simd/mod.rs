//! Eight lanes of f32, and the choice of an instruction set at run time.
//!
//! A kernel is written once over [`Simd`] and run through [`dispatch`], which
//! compiles it for the chosen [`SimdPath`]. Every lane operation is one exactly
//! defined IEEE operation (`fma` is always fused), so all paths give the same
//! bits. No kernel lives here.

use crate::types::EngineError;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::widen_four;
pub use scalar::Scalar;

/// Lanes of a vector.
pub const LANES: usize = 8;

/// Name of the environment variable that forces a path.
pub const PATH_VARIABLE: &str = "GREENROOM_CPU";

/// Instruction set of the kernels. Ordered by speed among those of one architecture, nothing more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SimdPath {
    /// Plain Rust, whatever the compilation target has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2's, and AVX-VNNI for int8 products.
    AvxVnni,
    /// AVX2's, and AVX-512 F, BW, VL and VNNI for int8 products.
    Avx512,
    /// NEON, and `sdot` (FEAT_DotProd) for int8 products. AArch64.
    Neon,
}

impl SimdPath {
    /// Every path of every architecture; of those that one processor supports, the slowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Neon];

    /// The name by which it is forced.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Whether this processor can run it.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
                && std::arch::is_x86_feature_detected!("f16c");
            let avx512 = || {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::AvxVnni => avx2 && std::arch::is_x86_feature_detected!("avxvnni"),
                Self::Avx512 => avx2 && avx512(),
                Self::Neon => false,
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            // Kernels read packed words as they lie in memory, which is little-endian.
            let neon = || {
                cfg!(target_endian = "little")
                    && std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 | Self::AvxVnni | Self::Avx512 => false,
                Self::Neon => neon(),
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Self::Portable
        }
    }

    /// The best supported path, or the one named.
    ///
    /// # Errors
    /// `Device` when the name is unknown or this processor cannot run it.
    pub fn choose(forced: Option<&str>) -> Result<Self, EngineError> {
        let Some(name) = forced else {
            let best = Self::ALL.into_iter().rev().find(|path| path.is_supported());
            return Ok(best.unwrap_or(Self::Portable));
        };
        let path = Self::ALL.into_iter().find(|path| path.name() == name);
        let Some(path) = path else {
            let message =
                format!("{PATH_VARIABLE}={name} is not known: use portable, avx2, avxvnni, avx512 or neon");
            return Err(EngineError::Device { message });
        };
        if !path.is_supported() {
            let message = format!("{PATH_VARIABLE}={name}: this processor lacks the instructions it needs");
            return Err(EngineError::Device { message });
        }
        Ok(path)
    }

    /// [`Self::choose`] with the environment's wish.
    ///
    /// # Errors
    /// As [`Self::choose`].
    pub fn from_env() -> Result<Self, EngineError> {
        match std::env::var_os(PATH_VARIABLE) {
            None => Self::choose(None),
            Some(value) if value.is_empty() => Self::choose(None),
            Some(value) => Self::choose(Some(&value.to_string_lossy())),
        }
    }
}

/// Eight-lane arithmetic. A value of an implementing type is the proof that the
/// processor has the instructions.
pub trait Simd: Copy {
    /// Eight f32.
    type V: Copy;
    /// Eight u32.
    type U: Copy;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// From an array.
    fn load(self, from: &[f32; LANES]) -> Self::V;
    /// From memory, any alignment.
    ///
    /// # Safety
    /// 32 bytes are readable at `from`.
    unsafe fn load_ptr(self, from: *const f32) -> Self::V;
    /// Eight IEEE halves, widened (exact).
    ///
    /// # Safety
    /// 16 bytes are readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// Eight truncated singles, widened (exact).
    ///
    /// # Safety
    /// 16 bytes are readable at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// To an array.
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    /// To memory, any alignment.
    ///
    /// # Safety
    /// 32 bytes are writable at `to`.
    unsafe fn store_ptr(self, v: Self::V, to: *mut f32);
    /// Rounded to IEEE halves, ties to even.
    fn to_f16(self, v: Self::V) -> [u16; LANES];
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a − b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`: `b` when either is not a number.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Magnitude.
    fn abs(self, v: Self::V) -> Self::V;
    /// `y` where `x >= bound` or `x` is not a number, 0 elsewhere.
    fn zero_below(self, x: Self::V, bound: Self::V, y: Self::V) -> Self::V;
    /// `2^n` of integral `n` in −126..=127; anything elsewhere.
    fn exp2_integral(self, n: Self::V) -> Self::V;
    /// Integral lanes in −128..=127 as integers, vector after vector; anything elsewhere.
    fn to_i8(self, v: [Self::V; 4]) -> [i8; 4 * LANES];
    /// The largest lane; none may be NaN.
    #[inline(always)]
    fn top(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, |top, lane| if lane > top { lane } else { top })
    }
    /// Sum of the lanes in whatever order: for sums that are exact in every order.
    #[inline(always)]
    fn total(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        tree_sum(lanes)
    }
    /// Eight u32 from memory, any alignment.
    ///
    /// # Safety
    /// 32 bytes are readable at `from`.
    unsafe fn load_u32(self, from: *const u8) -> Self::U;
    /// Wishes that the cache line at an address, which need not be readable, be near soon.
    #[inline(always)]
    fn prefetch(self, _line: *const u8) {}
    /// `(u >> shift) & mask` as f32, exact below 2^24.
    fn field(self, u: Self::U, shift: u32, mask: u32) -> Self::V;
}

/// A kernel body, generic over the instruction set. Implement `run` with
/// `#[inline(always)]`, or it is compiled for the base instruction set. The same befalls closures that are
/// handed to functions of the standard library (`map` of an array): loops are safe.
pub trait Kernel {
    /// What it gives.
    type Output;
    /// The body.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs a kernel compiled for `path`, or the portable one where this processor lacks its
/// instructions (the bits are the same).
#[inline]
pub fn dispatch<K: Kernel>(path: SimdPath, kernel: K) -> K::Output {
    match path {
        // SAFETY: the processor was asked for AVX2, FMA and F16C; its answer is cached.
        #[cfg(target_arch = "x86_64")]
        SimdPath::Avx2 | SimdPath::AvxVnni | SimdPath::Avx512 if SimdPath::Avx2.is_supported() => unsafe {
            avx2::run(kernel)
        },
        // SAFETY: the processor was asked for NEON; its answer is cached.
        #[cfg(target_arch = "aarch64")]
        SimdPath::Neon if SimdPath::Neon.is_supported() => unsafe { neon::run(kernel) },
        SimdPath::Portable | SimdPath::Avx2 | SimdPath::AvxVnni | SimdPath::Avx512 | SimdPath::Neon => {
            kernel.run(Scalar)
        }
    }
}

/// Sum of eight lanes by one fixed tree.
#[inline(always)]
pub fn tree_sum(v: [f32; LANES]) -> f32 {
    ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
}

/// A half widened to single, exact.
#[inline(always)]
pub fn widen_f16(h: u16) -> f32 {
    // Shifting the exponent into place and multiplying by 2^112 also makes subnormals right;
    // only infinities and NaN need their exponent filled up.
    let sign = (u32::from(h) & 0x8000) << 16;
    let magnitude = (u32::from(h) & 0x7fff) << 13;
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let special = if h & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { scaled };
    f32::from_bits(special | sign)
}

/// A truncated single widened, exact.
#[inline(always)]
pub fn widen_bf16(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}
