//! Products of packed weights with activations: the driver.
//!
//! Work is cut by panels (sixteen rows) and blocks of tokens; never by columns,
//! so each output is one fixed chain whatever the number of threads or tokens.
//! The chains themselves: [`widened`] in f32, [`portable`] and its vector twins
//! with int8 activations.

use super::pool::ThreadPool;
use super::simd::{SimdPath, dispatch};
use super::weight::{Format, GROUP, PANEL_ROWS, PackedWeight, Part, Quantised};

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod widened;

pub use activations::{DisjointInt8Rows, Int8Row, Int8Rows};

use widened::WidenedPanel;

/// Tokens of a decode step, mostly: their results are few.
const FEW: usize = 8;
/// Tokens that share a panel while it is in the first-level cache.
const TOKEN_BLOCK: usize = 64;
/// Panels whose results with a block of tokens are written together.
const TOGETHER: usize = 4;
/// Multiply-adds worth claiming at once: some microseconds.
const CLAIM: usize = 1 << 18;

/// How and where to compute.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// Instruction set.
    pub path: SimdPath,
    /// Threads to compute on.
    pub pool: &'a ThreadPool,
    /// At most so many of them.
    pub threads: usize,
}

/// Activations of a product, in the forms its weight needs.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// How many tokens.
    pub tokens: usize,
    /// `[tokens][cols]`, for dense parts, and all parts where `int8` is not given.
    pub f32: &'a [f32],
    /// For quantised parts.
    pub int8: Option<&'a Int8Rows>,
}

/// What becomes of the results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Store {
    /// Overwrite.
    Set,
    /// Add to what is there.
    Add,
}

/// One panel and int8 activations.
struct Int8Panel<'a> {
    bytes: &'a [u8],
    format: Quantised,
    x: &'a Int8Rows,
}

impl<'a> Int8Panel<'a> {
    /// Checks once what kernels rely on: a whole panel as wide as the activations, of `tokens` tokens.
    fn new(bytes: &'a [u8], format: Quantised, x: &'a Int8Rows, tokens: usize) -> Self {
        let groups = tokens * x.groups();
        assert_eq!(bytes.len(), Format::Quantised(format).panel_bytes(x.cols), "a whole panel");
        assert!(x.cols.is_multiple_of(GROUP) && x.codes.len() >= tokens * x.cols, "codes of every token");
        let metadata = [x.scales.len(), x.sums.len(), x.half_sums.len(), x.scaled_sums.len()];
        assert!(metadata.iter().all(|len| *len >= groups), "scales of every token");
        Self { bytes, format, x }
    }

    fn product(&self, path: SimdPath, token: usize, tile: &mut [[f32; PANEL_ROWS]]) {
        match path {
            // SAFETY: the processor was asked for exactly the instructions of this path.
            #[cfg(target_arch = "x86_64")]
            SimdPath::Avx2 if path.is_supported() => unsafe { avx2::product(self, token, tile) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdPath::AvxVnni if path.is_supported() => unsafe { avxvnni::product(self, token, tile) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdPath::Avx512 if path.is_supported() => unsafe { avx512::product(self, token, tile) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            SimdPath::Neon if path.is_supported() => unsafe { neon::product(self, token, tile) },
            SimdPath::Portable | SimdPath::Avx2 | SimdPath::AvxVnni | SimdPath::Avx512 | SimdPath::Neon => {
                portable::product(self, token, tile)
            }
        }
    }
}

/// The output, written by several threads at disjoint places.
#[derive(Clone, Copy)]
struct Output {
    start: *mut f32,
    width: usize,
    store: Store,
}

// SAFETY: threads write through it only at the rows and tokens of items they claimed, each item once.
unsafe impl Sync for Output {}

impl Output {
    /// # Safety
    /// `token` and `row..row + values.len()` are inside the output and nobody else's.
    unsafe fn put(&self, token: usize, row: usize, values: &[f32]) {
        // SAFETY: the caller vouches for the place.
        let out =
            unsafe { std::slice::from_raw_parts_mut(self.start.add(token * self.width + row), values.len()) };
        match self.store {
            Store::Set => out.copy_from_slice(values),
            Store::Add => out.iter_mut().zip(values).for_each(|(out, value)| *out += value),
        }
    }
}

/// `out (+)= x · wᵀ`; `out` is `[tokens][w.rows]`.
///
/// # Panics
/// When widths or lengths do not fit together: the caller's fault, never the data's.
pub fn product(machine: Machine<'_>, w: &PackedWeight, x: Inputs<'_>, out: &mut [f32], store: Store) {
    assert_eq!(out.len(), x.tokens * w.rows, "an output for every token and row");
    if x.tokens == 0 {
        return;
    }
    let output = Output { start: out.as_mut_ptr(), width: w.rows, store };
    let panels = w.panels();
    let blocks = x.tokens.div_ceil(TOKEN_BLOCK);
    // Fewer than that would leave threads without work at the end.
    let many = panels * blocks >= 16 * TOGETHER * machine.threads;
    let together = if x.tokens > FEW && many { TOGETHER } else { 1 };
    let stacks = panels.div_ceil(together);
    let items = stacks * blocks;
    let per_item = together * PANEL_ROWS * w.cols.max(1) * x.tokens.min(TOKEN_BLOCK);
    let grain = (CLAIM / per_item).min(items / (4 * machine.threads.max(1))).max(1);
    machine.pool.run(machine.threads, items, grain, &|range| {
        for item in range {
            let (block, stack) = (item / stacks, item % stacks);
            let tokens = block * TOKEN_BLOCK..x.tokens.min((block + 1) * TOKEN_BLOCK);
            let panels = stack * together..panels.min((stack + 1) * together);
            // SAFETY: this thread claimed the item, which is all tokens of this block and the rows of
            // these panels; `out` is as long as asserted above.
            unsafe {
                if x.tokens <= FEW {
                    stack_product::<1, FEW>(machine.path, w, panels, x, tokens, &output);
                } else {
                    stack_product::<TOGETHER, TOKEN_BLOCK>(machine.path, w, panels, x, tokens, &output);
                }
            };
        }
    });
}

/// The part that the weight's `panel`-th panel is in, and its index there.
fn locate(w: &PackedWeight, mut panel: usize) -> (&Part, usize) {
    let mut current = &w.parts[0];
    for part in &w.parts {
        current = part;
        if panel < part.panels() {
            break;
        }
        panel -= part.panels();
    }
    (current, panel)
}

/// At most `P` panels with at most `N` tokens.
///
/// # Safety
/// The outputs of these tokens and these panels' rows are the caller's alone.
unsafe fn stack_product<const P: usize, const N: usize>(
    path: SimdPath,
    w: &PackedWeight,
    panels: std::ops::Range<usize>,
    x: Inputs<'_>,
    tokens: std::ops::Range<usize>,
    output: &Output,
) {
    let mut results = [[[0.0; PANEL_ROWS]; N]; P];
    let mut places = [(0, 0); P];
    for ((panel, results), place) in panels.clone().zip(&mut results).zip(&mut places) {
        let (part, panel) = locate(w, panel);
        let first = panel * PANEL_ROWS;
        *place = (part.first_row + first, PANEL_ROWS.min(part.rows - first));
        panel_product(path, w.cols, part, panel, x, tokens.clone(), &mut results[..tokens.len()]);
    }
    // A token's outputs of all panels follow each other: written together they share lines and pages.
    for (index, token) in tokens.enumerate() {
        for (results, (row, rows)) in results.iter().zip(places).take(panels.len()) {
            // SAFETY: passed on from the caller; `rows` of the panel are the part's.
            unsafe { output.put(token, row, &results[index][..rows]) };
        }
    }
}

/// One panel with some tokens.
fn panel_product(
    path: SimdPath,
    cols: usize,
    part: &Part,
    panel: usize,
    x: Inputs<'_>,
    tokens: std::ops::Range<usize>,
    results: &mut [[f32; PANEL_ROWS]],
) {
    let bytes = part.panel(panel);
    match (part.format, x.int8) {
        (Format::Quantised(format), Some(int8)) => {
            Int8Panel::new(bytes, format, int8, x.tokens).product(path, tokens.start, results);
        }
        (format, _) => {
            let x = x.f32[tokens.start * cols..tokens.end * cols].chunks((widened::TOKENS * cols).max(1));
            for (x, tile) in x.zip(results.chunks_mut(widened::TOKENS)) {
                dispatch(path, WidenedPanel { bytes, format, cols, x, tile });
            }
        }
    }
}
