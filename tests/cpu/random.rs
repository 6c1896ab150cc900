//! Numbers for tests and benches, the same in every run.

/// A small deterministic generator (xorshift), so that failures repeat.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in −1..1.
    pub fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() >> 32) as usize % bound
    }

    pub fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.signed()).collect()
    }
}
