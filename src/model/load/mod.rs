//! Where weights come from: every format ends in one neutral table of mapped
//! tensors, from which each backend packs its own.

pub mod tensor;

pub use tensor::{HostTensor, MetaType, RowOrder, TensorType};
