//! Activations: f32 buffers that go back to their arena when dropped.
//!
//! A steady decode step finds every activation it needs here and allocates none
//! (logits leave the backend and are not among them), which [`Arena::allocations`] lets tests assert. One thread only.

use std::cell::RefCell;
use std::rc::Rc;

/// Idle buffers kept; more are freed. A decoder layer has at most four alive at once.
const KEEP: usize = 16;

#[derive(Debug, Default)]
struct Idle {
    buffers: Vec<Vec<f32>>,
    allocations: u64,
}

/// Where buffers come from and go back to.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    idle: Rc<RefCell<Idle>>,
}

impl Arena {
    /// A tensor `[tokens, width]` whose contents are unspecified numbers.
    pub fn take(&self, tokens: usize, width: usize) -> Tensor {
        let len = tokens * width;
        let mut idle = self.idle.borrow_mut();
        let fits = idle.buffers.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.len()).map(|(index, _)| index);
        let buffer = match best {
            Some(index) => idle.buffers.swap_remove(index),
            None => {
                idle.allocations += 1;
                vec![0.0; len]
            }
        };
        Tensor { buffer, tokens, width, home: self.clone() }
    }

    /// Buffers allocated so far.
    pub fn allocations(&self) -> u64 {
        self.idle.borrow().allocations
    }

    fn give_back(&self, buffer: Vec<f32>) {
        let mut idle = self.idle.borrow_mut();
        idle.buffers.push(buffer);
        if idle.buffers.len() > KEEP {
            // The smallest is the cheapest to allocate again.
            let smallest = idle.buffers.iter().enumerate().min_by_key(|(_, buffer)| buffer.len());
            if let Some(index) = smallest.map(|(index, _)| index) {
                idle.buffers.swap_remove(index);
            }
        }
    }
}

/// A packed activation `[tokens, width]`, f32, row-major.
#[derive(Debug)]
pub struct Tensor {
    buffer: Vec<f32>,
    tokens: usize,
    width: usize,
    home: Arena,
}

impl Tensor {
    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All values, row-major.
    pub fn data(&self) -> &[f32] {
        &self.buffer[..self.tokens * self.width]
    }

    /// All values, row-major.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.tokens * self.width]
    }

    /// One token's values.
    pub fn row(&self, token: usize) -> &[f32] {
        &self.buffer[token * self.width..(token + 1) * self.width]
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.home.give_back(std::mem::take(&mut self.buffer));
    }
}
