//! MLX's affine quantisation: three tensors that are one matrix.
//!
//! `X.weight` holds codes in U32, `X.scales` and `X.biases` a value a group. Bits
//! and group are taken from the configuration and checked against the shapes;
//! where a layer differs from both, the shapes decide.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::super::malformed;
use super::super::table::Span;
use super::super::tensor::{MetaType, TensorType};
use super::safetensors::{Dtype, Stored};
use crate::types::LoadError;

type AllStored = BTreeMap<String, (usize, Stored)>;

/// A pair as the configuration gives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scheme {
    bits: u8,
    group: u16,
}

/// What `config.json` says about quantisation.
#[derive(Debug, Default)]
pub(super) struct Quantization {
    global: Option<Scheme>,
    /// By the layer's name, however the writer spelt it.
    layers: BTreeMap<String, Scheme>,
}

/// A matrix put together.
pub(super) struct Packed {
    pub kind: TensorType,
    pub shape: Vec<usize>,
    pub scales: Span,
    pub biases: Span,
}

impl Quantization {
    /// Reads the configuration; `path` is for errors.
    pub fn of(config: &Value, path: &Path) -> Result<Self, LoadError> {
        let table = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| config.get(*key).filter(|value| !value.is_null()));
        let Some(table) = table else { return Ok(Self::default()) };
        let table = table.as_object().ok_or_else(|| malformed(path, "`quantization` is not an object"))?;
        if let Some(method) = table.get("quant_method").and_then(Value::as_str) {
            return Err(LoadError::Unsupported {
                message: format!("quantisation by `{method}`; MLX's affine 4 and 8 bits are supported"),
            });
        }
        let global = scheme(table, "the whole model")?;
        let mut layers = BTreeMap::new();
        for (name, value) in table {
            if let Some(layer) = value.as_object()
                && let Some(scheme) = scheme(layer, name)?
            {
                layers.insert(name.clone(), scheme);
            }
        }
        Ok(Self { global, layers })
    }

    /// What the configuration says about a layer: its own entry, else the global one.
    fn expected(&self, layer: &str) -> Option<Scheme> {
        let own = self.layers.get(layer).or_else(|| {
            // Writers may prefix or strip `model.`, `language_model.` and the like.
            let tail =
                |long: &str, short: &str| long.strip_suffix(short).is_some_and(|front| front.ends_with('.'));
            let mut matching = self.layers.iter().filter(|(name, _)| tail(name, layer) || tail(layer, name));
            matching.next().map(|(_, scheme)| scheme)
        });
        own.copied().or(self.global)
    }

    /// Puts a quantised matrix together.
    pub fn affine(&self, name: &str, codes: &Stored, stored: &AllStored) -> Result<Packed, LoadError> {
        let wrong = |message: String| LoadError::Tensor { name: name.to_owned(), message };
        let layer = name
            .strip_suffix(".weight")
            .ok_or_else(|| wrong("is U32 but not the weight of a quantised layer".into()))?;
        let part = |kind: &str| {
            stored
                .get(&format!("{layer}.{kind}"))
                .ok_or_else(|| wrong(format!("is quantised, but `{layer}.{kind}` is missing")))
        };
        let ((scales_file, scales), (biases_file, biases)) = (part("scales")?, part("biases")?);
        let (&[rows, words], &[scale_rows, groups]) = (&codes.shape[..], &scales.shape[..]) else {
            return Err(wrong(format!(
                "and its scales are not matrices: {:?}, {:?}",
                codes.shape, scales.shape
            )));
        };
        if scale_rows != rows || biases.shape != scales.shape || biases.dtype != scales.dtype {
            return Err(wrong(format!(
                "has {rows} rows; scales are {} {:?}, biases {} {:?}",
                scales.dtype_name, scales.shape, biases.dtype_name, biases.shape
            )));
        }
        let meta = match scales.dtype {
            Dtype::F32 => MetaType::F32,
            Dtype::F16 => MetaType::F16,
            Dtype::BF16 => MetaType::BF16,
            Dtype::U32 | Dtype::Other => {
                return Err(wrong(format!("has scales of type {}", scales.dtype_name)));
            }
        };
        let scheme = self.scheme_for(layer, words, groups).map_err(wrong)?;
        Ok(Packed {
            kind: TensorType::Affine { bits: scheme.bits, group: scheme.group, meta },
            shape: vec![rows, groups * usize::from(scheme.group)],
            scales: Span { file: *scales_file, bytes: scales.bytes.clone() },
            biases: Span { file: *biases_file, bytes: biases.bytes.clone() },
        })
    }

    /// Bits and group that explain `words` of codes in `groups`: the layer's as configured, else
    /// with the configured group and other bits, else the global ones.
    fn scheme_for(&self, layer: &str, words: usize, groups: usize) -> Result<Scheme, String> {
        let bits_of_group = words.checked_mul(32).filter(|_| groups > 0).map_or(0, |bits| bits / groups);
        let explains = |scheme: &Scheme| {
            let bits = usize::from(scheme.bits) * usize::from(scheme.group);
            bits == bits_of_group && words.checked_mul(32) == groups.checked_mul(bits)
        };
        let expected = self.expected(layer);
        let same_group =
            expected.into_iter().flat_map(|scheme| [4, 8].map(|bits| Scheme { bits, group: scheme.group }));
        let found = expected.into_iter().chain(same_group).chain(self.global).find(explains);
        let scheme = found.ok_or_else(|| match expected {
            Some(Scheme { bits, group }) => format!(
                "has {words} words of codes and {groups} groups a row; {bits} bits in groups of {group} were expected"
            ),
            None => "is quantised, but config.json has no `quantization` with bits and group_size".into(),
        })?;
        if !matches!(scheme.bits, 4 | 8) || !matches!(scheme.group, 32 | 64 | 128) {
            let Scheme { bits, group } = scheme;
            return Err(format!(
                "has {bits} bits in groups of {group}; supported are 4 and 8 bits in groups of 32, 64 and 128"
            ));
        }
        Ok(scheme)
    }
}

fn scheme(table: &serde_json::Map<String, Value>, whose: &str) -> Result<Option<Scheme>, LoadError> {
    match table.get("mode").and_then(Value::as_str) {
        None | Some("affine") => {}
        Some(mode) => {
            return Err(LoadError::Unsupported {
                message: format!("quantisation mode `{mode}` of {whose}; `affine` is supported"),
            });
        }
    }
    let number = |key: &str| table.get(key).and_then(Value::as_u64);
    let (Some(bits), Some(group)) = (number("bits"), number("group_size")) else { return Ok(None) };
    match (u8::try_from(bits), u16::try_from(group)) {
        (Ok(bits), Ok(group)) if bits > 0 && group > 0 => Ok(Some(Scheme { bits, group })),
        _ => Err(LoadError::Unsupported {
            message: format!("{bits} bits in groups of {group} of {whose}; 4 and 8 bits are supported"),
        }),
    }
}

/// Whether a tensor is the scales or biases of a quantised matrix.
pub(super) fn is_part(name: &str, stored: &AllStored) -> bool {
    name.strip_suffix(".scales")
        .or_else(|| name.strip_suffix(".biases"))
        .and_then(|layer| stored.get(&format!("{layer}.weight")))
        .is_some_and(|(_, weight)| weight.dtype == Dtype::U32)
}
