//! How state is written: as it is stored, or in 8 bits.
//!
//! In 8 bits each 32 numbers in a row share a scale, the largest magnitude over 127 as f32, and are
//! rounded to the nearest multiple of it: a little over half the bytes of 16-bit state. That loses
//! something, so such segments have a namespace of their own, and who wants answers to the last bit
//! leaves it off. Numbers that are not finite are kept as NaN.

use half::{bf16, f16};

/// Numbers that share a scale.
const GROUP: usize = 32;
/// The code of a number that is not finite.
const NOT_FINITE: i8 = i8::MIN;

/// What the bytes of state are numbers of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Element {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// Single precision.
    F32,
}

/// How pieces are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Codec {
    /// As they are.
    #[default]
    Stored,
    /// Rounded to 8 bits.
    Q8(Element),
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Self::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        }
    }

    fn write(self, value: f32, into: &mut Vec<u8>) {
        match self {
            Self::F16 => into.extend(f16::from_f32(value).to_le_bytes()),
            Self::Bf16 => into.extend(bf16::from_f32(value).to_le_bytes()),
            Self::F32 => into.extend(value.to_le_bytes()),
        }
    }
}

impl Codec {
    /// For namespaces: empty where nothing is lost.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stored => "",
            Self::Q8(_) => " | 8 bits",
        }
    }

    /// A piece as it is written.
    pub fn encode(self, piece: Vec<u8>) -> Vec<u8> {
        let Self::Q8(element) = self else { return piece };
        let values: Vec<f32> = piece.chunks(element.bytes()).map(|bytes| element.read(bytes)).collect();
        let mut out = Vec::with_capacity(values.len() + values.len() / GROUP * 4 + 4);
        for group in values.chunks(GROUP) {
            let finite = group.iter().filter(|value| value.is_finite());
            let scale = finite.fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
            out.extend(scale.to_le_bytes());
            out.extend(group.iter().map(|value| {
                let code = if value.is_finite() && scale > 0.0 {
                    (value / scale).round().clamp(-127.0, 127.0) as i8
                } else if value.is_finite() {
                    0
                } else {
                    NOT_FINITE
                };
                code.cast_unsigned()
            }));
        }
        out
    }

    /// A piece as it was, as nearly as it is known; empty where the bytes cannot be such a piece.
    pub fn decode(self, piece: Vec<u8>) -> Vec<u8> {
        let Self::Q8(element) = self else { return piece };
        let mut out = Vec::with_capacity(piece.len() * element.bytes());
        for group in piece.chunks(4 + GROUP) {
            let Some((scale, codes)) = group.split_first_chunk::<4>() else { return Vec::new() };
            let scale = f32::from_le_bytes(*scale);
            for code in codes {
                let code = code.cast_signed();
                let value = if code == NOT_FINITE { f32::NAN } else { f32::from(code) * scale };
                element.write(value, &mut out);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_comes_back_within_half_a_step_of_its_group(
            values in prop::collection::vec(-300.0f32..300.0, 0..200),
            which in 0usize..3,
        ) {
            let element = [Element::F16, Element::Bf16, Element::F32][which];
            let mut bytes = Vec::new();
            values.iter().for_each(|value| element.write(*value, &mut bytes));
            let stored: Vec<f32> = bytes.chunks(element.bytes()).map(|bytes| element.read(bytes)).collect();
            let written = Codec::Q8(element).encode(bytes.clone());
            prop_assert!(written.len() <= values.len() + values.len().div_ceil(GROUP) * 4);
            let back = Codec::Q8(element).decode(written);
            prop_assert_eq!(back.len(), bytes.len());
            let back = back.chunks(element.bytes()).map(|bytes| element.read(bytes));
            for (group, back) in stored.chunks(GROUP).zip(back.collect::<Vec<_>>().chunks(GROUP)) {
                let most = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (value, back) in group.iter().zip(back) {
                    // Half a step, and what the type itself rounds.
                    prop_assert!((value - back).abs() <= most / 254.0 * 1.01 + value.abs() / 128.0 + 1e-6);
                }
            }
            prop_assert_eq!(Codec::Stored.decode(Codec::Stored.encode(bytes.clone())), bytes);
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_spoils_no_neighbour() {
        let mut bytes = Vec::new();
        [f32::INFINITY, 1.0, f32::NAN, -1.0].iter().for_each(|value| Element::F16.write(*value, &mut bytes));
        let codec = Codec::Q8(Element::F16);
        let back = codec.decode(codec.encode(bytes));
        let back: Vec<f32> = back.chunks(2).map(|bytes| Element::F16.read(bytes)).collect();
        assert!(back[0].is_nan() && back[2].is_nan());
        assert_eq!((back[1], back[3]), (1.0, -1.0));
        assert!(codec.decode(vec![1, 2]).is_empty());
    }
}
