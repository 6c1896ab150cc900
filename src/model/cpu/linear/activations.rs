//! Activations rounded to int8 by groups of 32 columns.
//!
//! Written once over [`Simd`]; a token's codes depend on that token alone.

use std::marker::PhantomData;
use std::slice::from_raw_parts_mut;

use super::super::math::ROUND;
use super::super::simd::{Kernel, LANES, Simd, SimdPath, dispatch};
use super::super::weight::GROUP;

/// Tokens' activations as codes in −127..=127 with a scale a group.
#[derive(Debug, Default)]
pub struct Int8Rows {
    /// `[tokens][cols]`.
    pub codes: Vec<i8>,
    /// `[tokens][cols / 32]`: a code times this is the value. NaN where the group holds a number that is not finite.
    pub scales: Vec<f32>,
    /// `[tokens][cols / 32]`: sum of the codes.
    pub sums: Vec<i32>,
    /// `[tokens][cols / 32]`: sum of the first 16 codes, for weights with scales for 16 columns.
    pub half_sums: Vec<i32>,
    /// `[tokens][cols / 32]`: `scale · sum`, for weights with a bias.
    pub scaled_sums: Vec<f32>,
    /// Columns.
    pub cols: usize,
}

impl Int8Rows {
    /// Makes room for `tokens` rows of `cols` columns, a multiple of 32; reuses what is there.
    pub fn resize(&mut self, tokens: usize, cols: usize) {
        let groups = tokens * (cols / GROUP);
        self.cols = cols;
        self.codes.resize(tokens * cols, 0);
        self.scales.resize(groups, 0.0);
        self.sums.resize(groups, 0);
        self.half_sums.resize(groups, 0);
        self.scaled_sums.resize(groups, 0.0);
    }

    /// Groups of a token.
    pub fn groups(&self) -> usize {
        self.cols / GROUP
    }

    /// All rows, for threads that each round some tokens.
    pub fn disjoint(&mut self) -> DisjointInt8Rows<'_> {
        let groups = self.groups();
        DisjointInt8Rows {
            codes: self.codes.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            half_sums: self.half_sums.as_mut_ptr(),
            scaled_sums: self.scaled_sums.as_mut_ptr(),
            cols: self.cols,
            groups,
            tokens: self.codes.len().checked_div(self.cols).unwrap_or(0),
            rows: PhantomData,
        }
    }
}

/// [`Int8Rows`] that threads fill at disjoint tokens.
#[derive(Debug)]
pub struct DisjointInt8Rows<'a> {
    codes: *mut i8,
    scales: *mut f32,
    sums: *mut i32,
    half_sums: *mut i32,
    scaled_sums: *mut f32,
    cols: usize,
    groups: usize,
    tokens: usize,
    rows: PhantomData<&'a mut Int8Rows>,
}

// SAFETY: `row` makes its caller vouch that no token is handed out twice at a time.
unsafe impl Sync for DisjointInt8Rows<'_> {}

impl DisjointInt8Rows<'_> {
    /// One token's place.
    ///
    /// # Safety
    /// Nobody else holds this token's place.
    ///
    /// # Panics
    /// Beyond the last token.
    pub unsafe fn row(&self, token: usize) -> Int8Row<'_> {
        assert!(token < self.tokens, "a token of the rows");
        let (code, group) = (token * self.cols, token * self.groups);
        // SAFETY: inside the vectors, which `resize` made as long as `tokens` rows; exclusive by the
        // caller's word and the borrow that made `self`.
        unsafe {
            Int8Row {
                codes: from_raw_parts_mut(self.codes.add(code), self.cols),
                scales: from_raw_parts_mut(self.scales.add(group), self.groups),
                sums: from_raw_parts_mut(self.sums.add(group), self.groups),
                half_sums: from_raw_parts_mut(self.half_sums.add(group), self.groups),
                scaled_sums: from_raw_parts_mut(self.scaled_sums.add(group), self.groups),
            }
        }
    }
}

/// One token's place in [`Int8Rows`].
#[derive(Debug)]
pub struct Int8Row<'a> {
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    half_sums: &'a mut [i32],
    scaled_sums: &'a mut [f32],
}

impl Int8Row<'_> {
    /// Rounds `x`, as wide as the row.
    pub fn round(self, path: SimdPath, x: &[f32]) {
        dispatch(path, Round { x, row: self });
    }
}

struct Round<'a> {
    x: &'a [f32],
    row: Int8Row<'a>,
}

impl Kernel for Round<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let row = self.row;
        let (groups, _) = self.x.as_chunks::<GROUP>();
        let (codes, _) = row.codes.as_chunks_mut::<GROUP>();
        for (g, (x, codes)) in groups.iter().zip(codes).enumerate() {
            let (chunks, _) = x.as_chunks::<LANES>();
            let x = [s.load(&chunks[0]), s.load(&chunks[1]), s.load(&chunks[2]), s.load(&chunks[3])];
            let (mut largest, mut taint) = (s.splat(0.0), s.splat(0.0));
            for v in x {
                largest = s.max(s.abs(v), largest);
                taint = s.add(taint, s.mul(v, s.splat(0.0)));
            }
            let (largest, taint) = (s.top(largest), s.total(taint));
            let inverse = s.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
            let mut rounded = x;
            for v in &mut rounded {
                let nearest = s.sub(s.add(s.mul(*v, inverse), s.splat(ROUND)), s.splat(ROUND));
                // The bounds hold anyway for numbers; they keep infinities and NaN in range on every path.
                *v = s.max(s.min(nearest, s.splat(127.0)), s.splat(-127.0));
            }
            *codes = s.to_i8(rounded);
            // Sums of few small integers: exact in f32, in any order.
            let half_sum = s.total(s.add(rounded[0], rounded[1])) as i32;
            let sum = half_sum + s.total(s.add(rounded[2], rounded[3])) as i32;
            // Adding a zero, or NaN where a value was not finite: rounding must not hide it.
            let scale = largest / 127.0 + taint;
            row.scales[g] = scale;
            row.sums[g] = sum;
            row.half_sums[g] = half_sum;
            row.scaled_sums[g] = scale * sum as f32;
        }
    }
}
