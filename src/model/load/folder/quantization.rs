//! MLX's affine quantisation: three tensors that are one matrix.
//!
//! `X.weight` holds codes in U32, `X.scales` and `X.biases` a value a group. The
//! configuration gives bits and group, for the whole model and for single layers;
//! with the group the shapes tell the bits. What the configuration says of a layer
//! by name must agree with its shapes; where it has the model's figures only, the
//! shapes decide, for writers spell layers in more ways than can be matched.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::super::malformed;
use super::super::table::Span;
use super::super::tensor::{MetaType, TensorType};
use super::safetensors::{Dtype, Stored};
use crate::types::LoadError;

const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
const GROUPS: [u16; 3] = [32, 64, 128];
const SUPPORTED: &str = "2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128";
const AFFINE: &str = "affine";

/// A checkpoint's tensors by name, each with the index of its file.
pub(in crate::model::load) type AllStored = BTreeMap<String, (usize, Stored)>;

/// How codes are made, as the configuration gives it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Scheme {
    bits: u8,
    group: u16,
    mode: String,
}

/// What the configuration says about one layer.
#[derive(Debug)]
enum Layer {
    Quantised(Scheme),
    /// `false`: left as it was.
    Plain,
}

/// What `config.json` says about quantisation.
#[derive(Debug, Default)]
pub(in crate::model::load) struct Quantization {
    global: Option<Scheme>,
    /// By the layer's name, however the writer spelt it.
    layers: BTreeMap<String, Layer>,
    /// Those names by their letters from the last to the first: what ends alike is side by side.
    reversed: BTreeMap<String, String>,
}

/// A matrix put together.
pub(in crate::model::load) struct Packed {
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
                message: format!(
                    "quantisation by `{method}`; MLX's affine quantisation is supported: {SUPPORTED}"
                ),
            });
        }
        let global =
            scheme(table, None).map_err(|what| malformed(path, format!("`quantization`: {what}")))?;
        let mut layers = BTreeMap::new();
        for (name, value) in table {
            let layer = match value {
                Value::Bool(false) => Some(Layer::Plain),
                Value::Object(own) => scheme(own, global.as_ref())
                    .map_err(|what| malformed(path, format!("`quantization` of `{name}`: {what}")))?
                    .map(Layer::Quantised),
                // `true` is the model's own scheme; the rest are the model's figures.
                _ => None,
            };
            layers.extend(layer.map(|layer| (name.clone(), layer)));
        }
        let reversed = layers.keys().map(|name| (reversed(name), name.clone())).collect();
        Ok(Self { global, layers, reversed })
    }

    /// The configuration's entry for a layer: by its name, else by the longest one that is a part of
    /// the other, for writers put `model.`, `language_model.` and the like before names or take it off.
    fn own(&self, layer: &str) -> Option<&Layer> {
        let longer = || {
            let front = reversed(layer) + ".";
            let alike = self.reversed.range(front.clone()..).take_while(|(name, _)| name.starts_with(&front));
            alike.map(|(_, name)| name).max_by_key(|name| (name.len(), name.as_str()))
        };
        let shorter = || layer.match_indices('.').find_map(|(dot, _)| self.layers.get(&layer[dot + 1..]));
        let own = self.layers.get(layer);
        own.or_else(|| longer().and_then(|name| self.layers.get(name))).or_else(shorter)
    }

    /// Puts a quantised matrix together.
    pub fn affine(&self, name: &str, codes: &Stored, stored: &AllStored) -> Result<Packed, LoadError> {
        let wrong = |message: String| LoadError::Tensor { name: name.to_owned(), message };
        let layer = name
            .strip_suffix(".weight")
            .ok_or_else(|| wrong("is U32 but not the weight of a quantised layer".into()))?;
        let (scheme, is_own) = self.scheme_of(layer).map_err(|message| wrong(message.into()))?;
        if scheme.mode != AFFINE {
            let message =
                format!("tensor `{name}` is quantised in mode `{}`; `{AFFINE}` is supported", scheme.mode);
            return Err(LoadError::Unsupported { message });
        }
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
        let bits = bits_of(scheme, is_own, words, groups).map_err(wrong)?;
        Ok(Packed {
            kind: TensorType::Affine { bits, group: scheme.group, meta },
            shape: vec![rows, groups.saturating_mul(usize::from(scheme.group))],
            scales: Span { file: *scales_file, bytes: scales.bytes.clone() },
            biases: Span { file: *biases_file, bytes: biases.bytes.clone() },
        })
    }

    /// The scheme of a layer that is stored quantised, and whether it is the layer's own.
    fn scheme_of(&self, layer: &str) -> Result<(&Scheme, bool), &'static str> {
        match (self.own(layer), &self.global) {
            (Some(Layer::Quantised(scheme)), _) => Ok((scheme, true)),
            (Some(Layer::Plain), _) => {
                Err("is stored quantised; `quantization` in config.json says `false` of it")
            }
            (None, Some(scheme)) => Ok((scheme, false)),
            (None, None) => {
                Err("is quantised, but config.json has no `quantization` with bits and group_size")
            }
        }
    }
}

fn reversed(name: &str) -> String {
    name.chars().rev().collect()
}

/// The bits of a layer's codes, told by its shapes and checked against the configuration.
fn bits_of(scheme: &Scheme, is_own: bool, words: usize, groups: usize) -> Result<u8, String> {
    let Scheme { bits: expected, group, .. } = *scheme;
    let codes = groups.checked_mul(usize::from(group)).filter(|codes| *codes > 0);
    let stored = words.checked_mul(32);
    let found = match (stored, codes) {
        (Some(stored), Some(codes)) if stored.is_multiple_of(codes) => Some(stored / codes),
        _ => None,
    };
    let is_supported = GROUPS.contains(&group)
        && found.is_some_and(|bits| BITS.contains(&bits))
        && BITS.contains(&expected.into());
    match found.and_then(|bits| u8::try_from(bits).ok()) {
        Some(bits) if is_supported && (bits == expected || !is_own) => Ok(bits),
        Some(bits) if bits == expected => {
            Err(format!("has {bits} bits in groups of {group}; supported are {SUPPORTED}"))
        }
        _ => Err(format!(
            "has {words} words of codes and {groups} groups a row, which in groups of {group} are {}; config.json says {expected} bits",
            found.map_or_else(|| "no whole bits".into(), |bits| format!("{bits} bits")),
        )),
    }
}

/// Bits, group and mode of a table; what a layer's table leaves out is the model's, but for the mode,
/// which is affine. `None` where the model's table has neither.
fn scheme(table: &Map<String, Value>, global: Option<&Scheme>) -> Result<Option<Scheme>, String> {
    let number = |key: &str| match table.get(key) {
        None => Ok(None),
        Some(value) => value
            .as_u64()
            .and_then(|number| u16::try_from(number).ok())
            .filter(|number| *number > 0)
            .map(Some)
            .ok_or_else(|| format!("`{key}` is {value}, not a number from 1 on")),
    };
    let bits = number("bits")?.or(global.map(|scheme| scheme.bits.into()));
    let group = number("group_size")?.or(global.map(|scheme| scheme.group));
    let mode = match table.get("mode") {
        None | Some(Value::Null) => AFFINE,
        Some(mode) => mode.as_str().ok_or_else(|| format!("`mode` is {mode}, not a text"))?,
    };
    match (bits, group) {
        (Some(bits), Some(group)) => {
            let bits =
                u8::try_from(bits).map_err(|_| format!("`bits` is {bits}; supported are {SUPPORTED}"))?;
            Ok(Some(Scheme { bits, group, mode: mode.to_owned() }))
        }
        (None, None) => Ok(None),
        _ => Err("`bits` and `group_size` are needed together".into()),
    }
}

/// Whether a tensor is the scales or biases of a quantised matrix.
pub(in crate::model::load) fn is_part(name: &str, stored: &AllStored) -> bool {
    name.strip_suffix(".scales")
        .or_else(|| name.strip_suffix(".biases"))
        .and_then(|layer| stored.get(&format!("{layer}.weight")))
        .is_some_and(|(_, weight)| weight.dtype == Dtype::U32)
}
