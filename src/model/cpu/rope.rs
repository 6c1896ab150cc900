//! Rotary position embedding: tables of cosines and sines, grown on demand.
//!
//! The angle is `position · inv_freq` in f32, as reference implementations
//! compute it; its cosine and sine are taken in f64 and rounded, so that they do
//! not depend on a system's f32 library.

use std::sync::Arc;

/// Table of one set of frequencies.
#[derive(Debug)]
pub struct RopeTable {
    inv_freq: Arc<[f32]>,
    /// Inside the table.
    scale: f32,
    /// A position's cosines, then its sines.
    table: Vec<f32>,
    positions: usize,
}

impl RopeTable {
    fn new(inv_freq: Arc<[f32]>, scale: f32) -> Self {
        Self { inv_freq, scale, table: Vec::new(), positions: 0 }
    }

    fn grow(&mut self, positions: usize) {
        if positions <= self.positions {
            return;
        }
        // Doubling, so that decoding token by token does not extend it each time.
        let positions = positions.next_power_of_two().max(256);
        self.table.reserve_exact((positions - self.positions) * 2 * self.inv_freq.len());
        for position in self.positions..positions {
            let angles = || self.inv_freq.iter().map(|freq| f64::from(position as f32 * *freq));
            self.table.extend(angles().map(|angle| angle.cos() as f32 * self.scale));
            self.table.extend(angles().map(|angle| angle.sin() as f32 * self.scale));
        }
        self.positions = positions;
    }

    /// Rotates a head's first dimensions in place; pair `i` is `(x[i], x[i + n])`.
    #[inline(always)]
    pub fn rotate(&self, head: &mut [f32], position: usize) {
        let n = self.inv_freq.len();
        let (cos, sin) = self.table[2 * n * position..2 * n * (position + 1)].split_at(n);
        let (first, rest) = head.split_at_mut(n);
        for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

/// The tables of a model; layers with equal frequencies and scale share one.
#[derive(Debug, Default)]
pub struct RopeTables {
    tables: Vec<RopeTable>,
}

impl RopeTables {
    /// The table of these frequencies and scale, covering at least `positions`.
    pub fn covering(&mut self, inv_freq: &Arc<[f32]>, scale: f32, positions: usize) -> &RopeTable {
        let same = |table: &RopeTable| {
            table.scale.to_bits() == scale.to_bits()
                && (Arc::ptr_eq(&table.inv_freq, inv_freq) || table.inv_freq == *inv_freq)
        };
        let known = self.tables.iter().position(same);
        let index = known.unwrap_or(self.tables.len());
        if known.is_none() {
            self.tables.push(RopeTable::new(Arc::clone(inv_freq), scale));
        }
        let table = &mut self.tables[index];
        table.grow(positions);
        table
    }
}
