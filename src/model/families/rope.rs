//! Frequencies of the rotary position embedding, with the scaling that a
//! configuration asks for already inside.
//!
//! Reads both spellings: `rope_theta` with `rope_scaling` beside it, and the
//! newer `rope_parameters` object that holds everything. A scaling that is not
//! known is refused: positions would be wrong without any error.

use super::hyperparameters::Hyperparameters;
use crate::types::LoadError;

/// Base where a configuration names none.
const DEFAULT_THETA: f64 = 10_000.0;
/// Positions that a scaling may have been trained for.
const MAX_POSITIONS: usize = 1 << 30;

/// Radians a position, `[head_dim / 2]`.
///
/// # Errors
/// `Unsupported` for an unknown scaling, `Format` for values that make no sense.
pub fn inverse_frequencies(config: &Hyperparameters<'_>, head_dim: usize) -> Result<Vec<f32>, LoadError> {
    let parameters = match config.object("rope_parameters", "rope_parameters.")? {
        Some(parameters) => Some(parameters),
        None => config.object("rope_scaling", "rope_scaling.")?,
    };
    let theta = match parameters.map(|inner| inner.positive("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => config.positive("rope_theta")?.unwrap_or(DEFAULT_THETA),
    };
    for source in [Some(*config), parameters].into_iter().flatten() {
        let part = source.positive("partial_rotary_factor")?;
        if let Some(part) = part.filter(|part| *part != 1.0) {
            return Err(source.refused("partial_rotary_factor", part, "only 1 is supported"));
        }
    }
    let mut frequencies: Vec<f64> =
        (0..head_dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / head_dim as f64)).collect();
    if let Some(parameters) = parameters {
        scale(&parameters, &mut frequencies)?;
    }
    divide_by_factors(config, &mut frequencies)?;
    Ok(frequencies.into_iter().map(|frequency| frequency as f32).collect())
}

fn scale(parameters: &Hyperparameters<'_>, frequencies: &mut [f64]) -> Result<(), LoadError> {
    let kind = match parameters.word("rope_type")? {
        Some(kind) => Some(kind),
        None => parameters.word("type")?,
    };
    if let Some(key) = parameters.nested() {
        return Err(parameters.refused(
            key,
            "an object",
            "one set of parameters for all layers is supported",
        ));
    }
    match kind {
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
        let key = "original_max_position_embeddings";
        let ramp = Self {
            factor: needed(parameters, "factor")?,
            low: needed(parameters, "low_freq_factor")?,
            high: needed(parameters, "high_freq_factor")?,
            original: parameters.needed_count(key, MAX_POSITIONS)? as f64,
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

/// Explicit factors, one a frequency, as GGUF files carry them.
fn divide_by_factors(config: &Hyperparameters<'_>, frequencies: &mut [f64]) -> Result<(), LoadError> {
    let key = "rope_freq_factors";
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
