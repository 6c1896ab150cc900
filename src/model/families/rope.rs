//! Frequencies of the rotary position embedding, with the scaling that a
//! configuration asks for already inside.
//!
//! Reads both spellings: `rope_theta` with `rope_scaling` beside it, and the
//! newer `rope_parameters` object that holds everything. A scaling that is not
//! known is refused: positions would be wrong without any error.

use super::hyperparameters::Hyperparameters;
use crate::types::LoadError;

/// Base where a configuration names none.
pub const DEFAULT_THETA: f64 = 10_000.0;
/// Positions that a scaling may have been trained for.
const MAX_POSITIONS: usize = 1 << 30;
/// Key of the positions that a model was trained for before it was stretched.
const ORIGINAL: &str = "original_max_position_embeddings";

/// One set of frequencies.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeSpec {
    /// Radians a position, half as many as dimensions that are rotated.
    pub inv_freq: Vec<f32>,
    /// Multiplies what is rotated.
    pub scale: f32,
    /// Other frequencies for engines with a context longer than this.
    pub long: Option<(u32, Vec<f32>)>,
}

impl RopeSpec {
    /// The frequencies for sequences of at most `context` tokens. One set for an engine's
    /// life: keys that are stored once cannot be rotated anew when a sequence grows.
    pub fn frequencies(&self, context: u32) -> &[f32] {
        match &self.long {
            Some((above, long)) if context > *above => long,
            _ => &self.inv_freq,
        }
    }
}

/// Frequencies of heads that are rotated whole.
///
/// # Errors
/// `Unsupported` for an unknown scaling, `Format` for values that make no sense.
pub fn read(
    config: &Hyperparameters<'_>,
    head_dim: usize,
    default_theta: f64,
) -> Result<RopeSpec, LoadError> {
    let parameters = parameters(config)?;
    for source in [Some(*config), parameters].into_iter().flatten() {
        refuse_partial(&source)?;
    }
    let theta = theta(config, parameters.as_ref(), default_theta)?;
    let mut frequencies = unscaled(theta, head_dim);
    if let Some(parameters) = &parameters {
        if let Some(key) = parameters.nested() {
            let instead = "one set of parameters for all layers is supported";
            return Err(parameters.refused(key, "an object", instead));
        }
        scale(parameters, &mut frequencies)?;
    }
    divide_by_factors(config, "rope_freq_factors", &mut frequencies)?;
    Ok(spec(frequencies))
}

/// Refuses heads that are rotated in part.
///
/// # Errors
/// `Unsupported`, and `Format` for what is not a number above 0.
pub fn refuse_partial(source: &Hyperparameters<'_>) -> Result<(), LoadError> {
    match source.positive("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            Err(source.refused("partial_rotary_factor", part, "only 1 is supported"))
        }
        _ => Ok(()),
    }
}

/// Frequencies of one kind of layer, by its own parameters.
///
/// # Errors
/// As [`read`].
pub fn of_layers(
    parameters: Option<&Hyperparameters<'_>>,
    head_dim: usize,
    theta: f64,
) -> Result<RopeSpec, LoadError> {
    let own = parameters.map(|inner| inner.positive("rope_theta")).transpose()?.flatten();
    let mut frequencies = unscaled(own.unwrap_or(theta), head_dim);
    if let Some(parameters) = parameters {
        refuse_partial(parameters)?;
        scale(parameters, &mut frequencies)?;
    }
    Ok(spec(frequencies))
}

/// Frequencies of heads that may be rotated in part, and may have one set of factors
/// for short and another for long contexts.
///
/// # Errors
/// As [`read`].
pub fn read_long(config: &Hyperparameters<'_>, head_dim: usize, context: u32) -> Result<RopeSpec, LoadError> {
    let parameters = parameters(config)?;
    let dims = rotated(config, parameters.as_ref(), head_dim)?;
    let frequencies = unscaled(theta(config, parameters.as_ref(), DEFAULT_THETA)?, dims);
    let Some(parameters) = parameters else { return Ok(spec(frequencies)) };
    match kind(&parameters)? {
        None | Some("default") => Ok(spec(frequencies)),
        Some("longrope" | "su") => long(config, &parameters, frequencies, context),
        Some(other) => Err(parameters.refused("rope_type", other, "`default` and `longrope` are supported")),
    }
}

fn long(
    config: &Hyperparameters<'_>,
    parameters: &Hyperparameters<'_>,
    frequencies: Vec<f64>,
    context: u32,
) -> Result<RopeSpec, LoadError> {
    // The reference lets the outer key win, its default included.
    let original = match config.count(ORIGINAL, MAX_POSITIONS)? {
        Some(original) => original,
        None => parameters.needed_count(ORIGINAL, MAX_POSITIONS)?,
    } as f64;
    let factor = parameters.positive("factor")?.unwrap_or(f64::from(context) / original);
    let scale = match parameters.positive("attention_factor")? {
        Some(scale) => scale,
        None if factor <= 1.0 => 1.0,
        None if original < 2.0 => return Err(parameters.wrong(ORIGINAL, "is 1, more are needed")),
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let divided = |key: &str| {
        let mut frequencies = frequencies.clone();
        match parameters.get(key) {
            Some(_) => divide_by_factors(parameters, key, &mut frequencies)?,
            None => return Err(parameters.wrong(key, "is missing")),
        }
        Ok(spec(frequencies).inv_freq)
    };
    let (short, long) = (divided("short_factor")?, divided("long_factor")?);
    Ok(RopeSpec { inv_freq: short, scale: scale as f32, long: Some((original as u32, long)) })
}

/// How many dimensions of a head are rotated.
fn rotated(
    config: &Hyperparameters<'_>,
    parameters: Option<&Hyperparameters<'_>>,
    head_dim: usize,
) -> Result<usize, LoadError> {
    let even = |source: &Hyperparameters<'_>, key: &str, dims: usize| {
        if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
            let message = format!("rotates {dims} of {head_dim} dimensions, an even number is needed");
            return Err(source.wrong(key, &message));
        }
        Ok(dims)
    };
    let key = "rope_dimension_count";
    if let Some(dims) = config.count(key, head_dim)? {
        return even(config, key, dims);
    }
    let key = "partial_rotary_factor";
    let sources = [parameters, Some(config)];
    for source in sources.into_iter().flatten() {
        if let Some(part) = source.positive(key)? {
            // Rounded down, as the reference does.
            return even(source, key, (head_dim as f64 * part) as usize);
        }
    }
    Ok(head_dim)
}

fn parameters<'a>(config: &Hyperparameters<'a>) -> Result<Option<Hyperparameters<'a>>, LoadError> {
    let newer = config.object("rope_parameters", "rope_parameters.")?;
    let older = config.object("rope_scaling", "rope_scaling.")?.filter(|older| !older.is_empty());
    match (newer, older) {
        (Some(newer), Some(older)) if newer.raw() != older.raw() => Err(two_ropes(config)),
        (newer, older) => Ok(older.or(newer)),
    }
}

/// The error where both spellings are there and differ: which one wins is nothing to guess.
pub fn two_ropes(config: &Hyperparameters<'_>) -> LoadError {
    config.wrong("rope_scaling", "and `rope_parameters` are both there and differ; one must go")
}

fn theta(
    config: &Hyperparameters<'_>,
    parameters: Option<&Hyperparameters<'_>>,
    default: f64,
) -> Result<f64, LoadError> {
    match parameters.map(|inner| inner.positive("rope_theta")).transpose()?.flatten() {
        Some(theta) => Ok(theta),
        None => Ok(config.positive("rope_theta")?.unwrap_or(default)),
    }
}

fn unscaled(theta: f64, dims: usize) -> Vec<f64> {
    (0..dims / 2).map(|i| theta.powf(-(2.0 * i as f64) / dims as f64)).collect()
}

fn spec(frequencies: Vec<f64>) -> RopeSpec {
    let inv_freq = frequencies.into_iter().map(|frequency| frequency as f32).collect();
    RopeSpec { inv_freq, scale: 1.0, long: None }
}

fn kind<'a>(parameters: &Hyperparameters<'a>) -> Result<Option<&'a str>, LoadError> {
    match parameters.word("rope_type")? {
        Some(kind) => Ok(Some(kind)),
        None => parameters.word("type"),
    }
}

fn scale(parameters: &Hyperparameters<'_>, frequencies: &mut [f64]) -> Result<(), LoadError> {
    match kind(parameters)? {
        None | Some("default") => Ok(()),
        Some("linear") => {
            let factor = needed(parameters, "factor")?;
            frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
            Ok(())
        }
        Some("llama3") => {
            let ramp = Ramp::read(parameters)?;
            frequencies.iter_mut().for_each(|frequency| *frequency = ramp.scaled(*frequency));
            Ok(())
        }
        Some(other) => {
            Err(parameters.refused("rope_type", other, "`default`, `linear` and `llama3` are supported"))
        }
    }
}

fn needed(parameters: &Hyperparameters<'_>, key: &str) -> Result<f64, LoadError> {
    parameters.positive(key)?.ok_or_else(|| parameters.wrong(key, "is missing"))
}

/// Llama 3: waves longer than the original context over `low` are slowed by
/// `factor`, those shorter than it over `high` stay, between them it is mixed.
struct Ramp {
    factor: f64,
    low: f64,
    high: f64,
    original: f64,
}

impl Ramp {
    fn read(parameters: &Hyperparameters<'_>) -> Result<Self, LoadError> {
        let ramp = Self {
            factor: needed(parameters, "factor")?,
            low: needed(parameters, "low_freq_factor")?,
            high: needed(parameters, "high_freq_factor")?,
            original: parameters.needed_count(ORIGINAL, MAX_POSITIONS)? as f64,
        };
        if ramp.high <= ramp.low {
            let message = format!("is {}, it must be above `low_freq_factor` = {}", ramp.high, ramp.low);
            return Err(parameters.wrong("high_freq_factor", &message));
        }
        Ok(ramp)
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let share = ((self.original / wavelength - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        (1.0 - share) * frequency / self.factor + share * frequency
    }
}

/// Explicit factors, one a frequency.
fn divide_by_factors(
    config: &Hyperparameters<'_>,
    key: &str,
    frequencies: &mut [f64],
) -> Result<(), LoadError> {
    let Some(value) = config.get(key) else { return Ok(()) };
    let factors: Option<Vec<f64>> =
        value.as_array().and_then(|list| list.iter().map(|factor| factor.as_f64()).collect());
    let Some(factors) = factors else {
        return Err(config.wrong(key, "is not a list of numbers"));
    };
    if factors.len() != frequencies.len() {
        let message = format!("has {} values, {} are needed", factors.len(), frequencies.len());
        return Err(config.wrong(key, &message));
    }
    if let Some(factor) = factors.iter().find(|factor| !(**factor > 0.0 && factor.is_finite())) {
        return Err(config.wrong(key, &format!("holds {factor}, numbers above 0 are needed")));
    }
    frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
    Ok(())
}
