//! The int8 product with AVX-512 VNNI; bit for bit [`super::portable`]. x86-64 only.
//!
//! A lane is a row, sixteen at once. `vpdpbusd` adds four unsigned-by-signed products to 32 bits exactly (it
//! is the form without saturation), so sums begin at what the zero point takes off. Up to eight tokens are
//! multiplied with the panel as it streams from memory, unpacked in registers. For more a stretch of it is
//! unpacked once, into the first-level cache, and eight tokens after eight pass over it.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::weight::{GROUP, PANEL_ROWS, Quantised, Scales};
use super::Int8Panel;
use super::avx2::prefetch;

/// Tokens of a pass.
const TOKENS: usize = 8;
/// Groups unpacked at once, at most: half of a first-level cache. Any block's groups divide it.
const STRETCH: usize = 24;
/// Bytes ahead of the codes in use that are wished near, where the panel streams past one or two tokens.
const AHEAD: usize = 1280;

/// 32 columns of sixteen rows, ready to be multiplied.
#[derive(Clone, Copy)]
struct Group {
    /// Of columns `4c..4c + 4` the `c`-th, as stored.
    codes: [__m512i; 8],
    scale: __m512,
    /// Of no matter where there is a zero point.
    bias: __m512,
    /// For the first and the second 16 columns; of no matter where scales have no integer factors for them.
    factors: [__m512; 2],
}

/// Products of one panel with `tile.len()` tokens from `token` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn product(panel: &Int8Panel<'_>, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
    match (panel.format.scales, panel.format.bits) {
        (Scales::Factors16, _) => by_bias::<6, true>(panel, token, tile),
        (_, 4) => by_bias::<4, false>(panel, token, tile),
        (_, 5) => by_bias::<5, false>(panel, token, tile),
        (_, 6) => by_bias::<6, false>(panel, token, tile),
        _ => by_bias::<8, false>(panel, token, tile),
    }
}

/// `SIXTEENS`: with integer factors for each 16 columns (and no biases).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn by_bias<const BITS: u8, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    if !SIXTEENS && panel.format.zero.is_none() {
        by_tokens::<BITS, true, SIXTEENS>(panel, token, tile);
    } else {
        by_tokens::<BITS, false, SIXTEENS>(panel, token, tile);
    }
}

/// `BIAS`: there is no zero point.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn by_tokens<const BITS: u8, const BIAS: bool, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    match tile.len() {
        0 => {}
        1 => streamed::<BITS, BIAS, SIXTEENS, 1>(panel, token, tile),
        2 => streamed::<BITS, BIAS, SIXTEENS, 2>(panel, token, tile),
        3 => streamed::<BITS, BIAS, SIXTEENS, 3>(panel, token, tile),
        4 => streamed::<BITS, BIAS, SIXTEENS, 4>(panel, token, tile),
        5 => streamed::<BITS, BIAS, SIXTEENS, 5>(panel, token, tile),
        6 => streamed::<BITS, BIAS, SIXTEENS, 6>(panel, token, tile),
        7 => streamed::<BITS, BIAS, SIXTEENS, 7>(panel, token, tile),
        8 => streamed::<BITS, BIAS, SIXTEENS, 8>(panel, token, tile),
        _ => stretches::<BITS, BIAS, SIXTEENS>(panel, token, tile),
    }
}

/// `M` tokens, the panel unpacked on the way.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn streamed<const BITS: u8, const BIAS: bool, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let q = &panel.format;
    let tokens = Tokens::<M>::new(panel, token, panel.x.groups());
    let mut sums = [_mm512_setzero_ps(); M];
    let mut index = 0;
    for block in panel.bytes.chunks_exact(q.block_bytes()) {
        let share = block.len() / q.spans;
        for span in 0..q.spans {
            if M <= 2 {
                for line in (share * span..share * (span + 1)).step_by(64) {
                    prefetch(block.as_ptr().wrapping_add(AHEAD + line));
                }
            }
            let group = group::<BITS, BIAS, SIXTEENS>(q, block, span);
            // SAFETY: a panel is as wide as the activations, as `Int8Panel::new` saw.
            unsafe { tokens.join::<BIAS, SIXTEENS>(&group, index, &mut sums) };
            index += 1;
        }
    }
    for (out, sum) in tile.iter_mut().zip(&sums) {
        // SAFETY: a tile's row is sixteen f32.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
}

/// Any number of tokens, the panel unpacked by stretches.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn stretches<const BITS: u8, const BIAS: bool, const SIXTEENS: bool>(
    panel: &Int8Panel<'_>,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let q = &panel.format;
    tile.fill([0.0; PANEL_ROWS]);
    let mut unpacked = [const { MaybeUninit::<Group>::uninit() }; STRETCH];
    let mut first = 0;
    for stretch in panel.bytes.chunks(STRETCH / q.spans * q.block_bytes()) {
        let mut count = 0;
        for block in stretch.chunks_exact(q.block_bytes()) {
            for span in 0..q.spans {
                unpacked[count].write(group::<BITS, BIAS, SIXTEENS>(q, block, span));
                count += 1;
            }
        }
        // SAFETY: the first `count` were written just now.
        let groups = unsafe { std::slice::from_raw_parts(unpacked.as_ptr().cast::<Group>(), count) };
        for (index, sums) in tile.chunks_mut(TOKENS).enumerate() {
            let token = token + TOKENS * index;
            match sums.len() {
                1 => pass::<BIAS, SIXTEENS, 1>(panel, groups, first, token, sums),
                2 => pass::<BIAS, SIXTEENS, 2>(panel, groups, first, token, sums),
                3 => pass::<BIAS, SIXTEENS, 3>(panel, groups, first, token, sums),
                4 => pass::<BIAS, SIXTEENS, 4>(panel, groups, first, token, sums),
                5 => pass::<BIAS, SIXTEENS, 5>(panel, groups, first, token, sums),
                6 => pass::<BIAS, SIXTEENS, 6>(panel, groups, first, token, sums),
                7 => pass::<BIAS, SIXTEENS, 7>(panel, groups, first, token, sums),
                _ => pass::<BIAS, SIXTEENS, TOKENS>(panel, groups, first, token, sums),
            }
        }
        first += count;
    }
}

/// `M` tokens over the groups of a stretch, whose first is the `first`-th of a row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn pass<const BIAS: bool, const SIXTEENS: bool, const M: usize>(
    panel: &Int8Panel<'_>,
    groups: &[Group],
    first: usize,
    token: usize,
    tile: &mut [[f32; PANEL_ROWS]],
) {
    let tokens = Tokens::<M>::new(panel, token, first + groups.len());
    let mut sums = [_mm512_setzero_ps(); M];
    for (sum, out) in sums.iter_mut().zip(&*tile) {
        // SAFETY: a tile's row is sixteen f32.
        *sum = unsafe { _mm512_loadu_ps(out.as_ptr()) };
    }
    for (index, group) in groups.iter().enumerate() {
        // SAFETY: `new` was told of all of these.
        unsafe { tokens.join::<BIAS, SIXTEENS>(group, first + index, &mut sums) };
    }
    for (out, sum) in tile.iter_mut().zip(&sums) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
}

/// The `span`-th group of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn group<const BITS: u8, const BIAS: bool, const SIXTEENS: bool>(
    q: &Quantised,
    block: &[u8],
    span: usize,
) -> Group {
    let (stored, scales) = block.split_at(q.spans * q.code_bytes());
    let stored = &stored[span * q.code_bytes()..(span + 1) * q.code_bytes()];
    let mut codes = [_mm512_setzero_si512(); 8];
    for c in 0..8 {
        codes[c] = unpack::<BITS>(stored, c);
    }
    if SIXTEENS {
        let scale = sixteen_halves(scales, 0);
        return Group { codes, scale, bias: scale, factors: signed_factors(q, scales, span) };
    }
    let [scale, bias] = sixteen_scales::<BIAS>(q, scales, span);
    Group { codes, scale, bias, factors: [scale; 2] }
}

/// Activations of `M` tokens, of which each has a certain number of groups at least.
struct Tokens<'a, const M: usize> {
    panel: &'a Int8Panel<'a>,
    /// Where each token's groups begin.
    first: [usize; M],
    groups: usize,
    zero: i32,
}

impl<'a, const M: usize> Tokens<'a, M> {
    /// # Panics
    /// Where a token has fewer groups than `groups`.
    fn new(panel: &'a Int8Panel<'a>, token: usize, groups: usize) -> Self {
        let all = panel.x.groups();
        assert!(groups <= all && (token + M) * all <= panel.x.scales.len(), "groups of every token");
        let first = std::array::from_fn(|i| (token + i) * all);
        Self { panel, first, groups, zero: i32::from(panel.format.zero.unwrap_or(0)) }
    }

    /// The `index`-th group's step of every chain.
    ///
    /// # Safety
    /// `index` is below the number of groups that `new` was told.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn join<const BIAS: bool, const SIXTEENS: bool>(
        &self,
        group: &Group,
        index: usize,
        sums: &mut [__m512; M],
    ) {
        let x = self.panel.x;
        debug_assert!(index < self.groups);
        // SAFETY: passed on from the caller.
        let dots = unsafe { self.dots::<BIAS, SIXTEENS>(group, index) };
        for i in 0..M {
            let at = self.first[i] + index;
            // SAFETY: `new` saw that the token has this group, `Int8Panel::new` as many sums as scales.
            let (x_scale, x_sum) = unsafe { (*x.scales.get_unchecked(at), *x.scaled_sums.get_unchecked(at)) };
            let scaled = _mm512_mul_ps(dots[i], _mm512_set1_ps(x_scale));
            sums[i] = _mm512_fmadd_ps(scaled, group.scale, sums[i]);
            if BIAS {
                sums[i] = _mm512_fmadd_ps(group.bias, _mm512_set1_ps(x_sum), sums[i]);
            }
        }
    }

    /// Sums of code products (with factors, where there are some) of one group, the zero point off.
    ///
    /// # Safety
    /// As for `join`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn dots<const BIAS: bool, const SIXTEENS: bool>(
        &self,
        group: &Group,
        index: usize,
    ) -> [__m512; M] {
        let x = self.panel.x;
        let mut totals = [_mm512_setzero_ps(); M];
        let together = if SIXTEENS { 4 } else { 8 };
        for part in 0..8 / together {
            let mut sums = [_mm512_setzero_si512(); M];
            if !BIAS {
                for i in 0..M {
                    let at = self.first[i] + index;
                    // SAFETY: as in `join`.
                    let (sum, half) = unsafe { (*x.sums.get_unchecked(at), *x.half_sums.get_unchecked(at)) };
                    let sum = match (SIXTEENS, part) {
                        (false, _) => sum,
                        (true, 0) => half,
                        (true, _) => sum - half,
                    };
                    sums[i] = _mm512_set1_epi32(-self.zero * sum);
                }
            }
            for c in part * together..(part + 1) * together {
                for i in 0..M {
                    let codes = four_codes(&x.codes, GROUP * (self.first[i] + index) + 4 * c);
                    sums[i] = _mm512_dpbusd_epi32(sums[i], group.codes[c], codes);
                }
            }
            for i in 0..M {
                let dot = _mm512_cvtepi32_ps(sums[i]);
                // Integers below 2^24 all along, so nothing rounds; and a sum of zeros is not negative.
                totals[i] = if SIXTEENS { _mm512_fmadd_ps(dot, group.factors[part], totals[i]) } else { dot };
            }
        }
        totals
    }
}

/// Codes of columns `4c..4c + 4` of sixteen rows, as stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack<const BITS: u8>(codes: &[u8], c: usize) -> __m512i {
    // SAFETY: a group's codes are 64 · BITS bytes, and `chunk < BITS`.
    let load = |chunk: usize| unsafe {
        debug_assert!(64 * chunk + 64 <= codes.len());
        _mm512_loadu_si512(codes.as_ptr().add(64 * chunk).cast())
    };
    if BITS == 8 {
        return load(c);
    }
    let shift = |v: __m512i, by: usize| _mm512_srl_epi16(v, _mm_cvtsi32_si128(by as i32));
    let nibble = _mm512_and_si512(shift(load(c % 4), 4 * (c / 4)), _mm512_set1_epi8(15));
    let upper = |plane: __m512i, by: usize, mask: i8| {
        _mm512_slli_epi16::<4>(_mm512_and_si512(shift(plane, by), _mm512_set1_epi8(mask)))
    };
    match BITS {
        5 => _mm512_or_si512(nibble, upper(load(4), c, 1)),
        6 => _mm512_or_si512(nibble, upper(load(4 + c / 4), 2 * (c % 4), 3)),
        _ => nibble,
    }
}

/// Four activation codes in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn four_codes(codes: &[i8], at: usize) -> __m512i {
    debug_assert!(at + 4 <= codes.len());
    // SAFETY: `Int8Panel::new` saw that the tokens' codes are there: a token's `cols` codes hold this group.
    _mm512_set1_epi32(unsafe { codes.as_ptr().add(at).cast::<i32>().read_unaligned() })
}

/// Scales and biases of sixteen rows for the `span`-th 32 columns of a block; biases are of no matter
/// where there are none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_scales<const BIAS: bool>(q: &Quantised, scales: &[u8], span: usize) -> [__m512; 2] {
    match q.scales {
        Scales::F16 => {
            let scale = sixteen_halves(scales, 0);
            [scale, if BIAS { sixteen_halves(scales, 1) } else { scale }]
        }
        Scales::F32 => {
            let scale = sixteen_singles(scales, 0);
            [scale, if BIAS { sixteen_singles(scales, 1) } else { scale }]
        }
        Scales::Factors32 | Scales::Factors16 => {
            let [factors, mins] = q.factors_at();
            let integers = |at| _mm512_cvtepi32_ps(sixteen_integers(scales, at, span));
            let scale = _mm512_mul_ps(sixteen_halves(scales, 0), integers(factors));
            if !BIAS {
                return [scale, scale];
            }
            let min = _mm512_mul_ps(sixteen_halves(scales, 1), integers(mins));
            let sign = _mm512_set1_epi32(i32::MIN);
            [scale, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(min), sign))]
        }
    }
}

/// The signed factors of sixteen rows for the two halves of the `span`-th 32 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn signed_factors(q: &Quantised, scales: &[u8], span: usize) -> [__m512; 2] {
    let [at, _] = q.factors_at();
    let factors = |half| {
        let stored = sixteen_integers(scales, at, 2 * span + half);
        _mm512_cvtepi32_ps(_mm512_sub_epi32(stored, _mm512_set1_epi32(128)))
    };
    [factors(0), factors(1)]
}

/// The `index`-th sixteen halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_halves(scales: &[u8], index: usize) -> __m512 {
    let bytes = &scales[32 * index..32 * index + 32];
    // SAFETY: the slice holds sixteen of them.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) }
}

/// The `index`-th sixteen singles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_singles(scales: &[u8], index: usize) -> __m512 {
    let bytes = &scales[64 * index..64 * index + 64];
    // SAFETY: the slice holds sixteen of them.
    unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) }
}

/// The integer factors of a group in sixteen rows, unsigned; `at` is where the integers begin.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sixteen_integers(scales: &[u8], at: usize, group: usize) -> __m512i {
    let bytes = &scales[at + 64 * (group / 4)..][..64];
    // SAFETY: the slice holds sixteen words.
    let words = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    let shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128(8 * (group as i32 % 4)));
    _mm512_and_si512(shifted, _mm512_set1_epi32(255))
}
