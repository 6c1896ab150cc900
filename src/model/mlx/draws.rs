//! Tokens drawn on the device: the best of each row, so that the next step can begin before
//! the host knows them.
//!
//! Beside each token goes a number that is zero where every logit is finite: a token is always
//! one of the vocabulary, because it may be looked up before anybody has seen that number.
//! Other ways of drawing need the host's exponential, whose bits no device has.

use mlx_rs::Array;
use mlx_rs::ops::indexing::{argmax_axis, take_axis};
use mlx_rs::ops::{concatenate, divide, multiply, sum_axis, tanh};
use mlx_rs::transforms::{async_eval, eval};

use super::{device_error, dim};
use crate::model::ops::{LogitShape, Step};
use crate::types::{EngineError, TokenId};

/// Draws of a step.
#[derive(Debug)]
pub struct MlxDraws {
    /// `[rows]`: tokens, and zero or NaN; or of a step that draws nothing what it computes.
    arrays: Drawn,
}

#[derive(Debug)]
enum Drawn {
    Nothing(Array),
    Best { tokens: Array, flaws: Array },
}

impl MlxDraws {
    /// Of a step that only computes.
    pub(super) fn nothing(hidden: &Array) -> Self {
        Self { arrays: Drawn::Nothing(hidden.clone()) }
    }

    /// The best of each row of logits `[rows, vocab]`, the first among equals.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn best(logits: &Array, shape: &LogitShape) -> Result<Self, EngineError> {
        let drawn = || {
            let scaled = match shape.scale == 1.0 {
                true => logits.clone(),
                false => multiply(logits, Array::from_f32(shape.scale))?,
            };
            // A cap keeps the order, but not what is different: those that become equal are a tie.
            let shaped = match shape.softcap {
                Some(cap) => {
                    let bent = tanh(&divide(&scaled, Array::from_f32(cap))?)?;
                    multiply(&bent, Array::from_f32(cap))?
                }
                None => scaled,
            };
            let flaws = sum_axis(&multiply(&shaped, Array::from_f32(0.0))?, -1, false)?;
            Ok(Drawn::Best { tokens: argmax_axis(&shaped, -1, false)?, flaws })
        };
        Ok(Self { arrays: drawn().map_err(device_error)? })
    }

    /// Hands the work to the device.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn start(&self) -> Result<(), EngineError> {
        match &self.arrays {
            Drawn::Nothing(hidden) => async_eval([hidden]),
            Drawn::Best { tokens, flaws } => async_eval([tokens, flaws]),
        }
        .map_err(device_error)
    }

    /// Waits for the tokens; `None` where a logit was not finite.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn wait(&self) -> Result<Vec<Option<TokenId>>, EngineError> {
        let (tokens, flaws) = match &self.arrays {
            Drawn::Nothing(hidden) => return hidden.eval().map(|()| Vec::new()).map_err(device_error),
            Drawn::Best { tokens, flaws } => (tokens, flaws),
        };
        eval([tokens, flaws]).map_err(device_error)?;
        let unread = |error| EngineError::Device { message: format!("drawn tokens: {error}") };
        let tokens = tokens.try_as_slice::<u32>().map_err(unread)?;
        let flaws = flaws.try_as_slice::<f32>().map_err(unread)?;
        let sound = |(token, flaw): (&u32, &f32)| (*flaw == 0.0).then_some(TokenId(*token));
        Ok(tokens.iter().zip(flaws).map(sound).collect())
    }

    /// Token ids of a step, of which the `.1`-th draw stands at each packed index `.0`.
    ///
    /// # Errors
    /// `Device`; `InvalidPlan` for a draw that there is not.
    pub(super) fn feed(
        &self,
        step: &Step<'_>,
        from: &[(usize, usize)],
    ) -> Result<Option<Array>, EngineError> {
        if from.is_empty() {
            return Ok(None);
        }
        let Drawn::Best { tokens, .. } = &self.arrays else { return Err(no_draw()) };
        let count = tokens.size();
        let mut ids: Vec<u32> = step.tokens.iter().map(|token| token.0).collect();
        let mut at: Vec<u32> = (0..).take(ids.len()).collect();
        for (index, draw) in from {
            let (Some(id), Some(at)) = (ids.get_mut(*index), at.get_mut(*index)) else {
                return Err(no_draw());
            };
            if *draw >= count {
                return Err(no_draw());
            }
            (*id, *at) = (0, (step.tokens.len() + draw) as u32);
        }
        let all = from.len() == ids.len();
        if all {
            at.iter_mut().for_each(|at| *at -= step.tokens.len() as u32);
            if at.len() == count && at.iter().enumerate().all(|(index, at)| index == *at as usize) {
                return Ok(Some(tokens.clone()));
            }
        }
        let at = Array::from_slice(&at, &[dim(at.len())?]);
        let known = Array::from_slice(&ids, &[dim(ids.len())?]);
        let source = match all {
            true => Ok(tokens.clone()),
            false => concatenate(&[&known, tokens], 0),
        };
        let ids = source.and_then(|source| take_axis(&source, &at, 0)).map_err(device_error)?;
        Ok(Some(ids))
    }
}

fn no_draw() -> EngineError {
    EngineError::InvalidPlan { message: "a row is to continue with a token that nobody draws".into() }
}
