//! Which tokens top-k, top-p and min-p leave over.
//!
//! Each filter first finds a bound below which no kept token can lie, and orders
//! only the tokens above it.

use std::cmp::Ordering;

use super::weigh;
use crate::types::SamplingParams;

/// A token that may be kept.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
}

/// Best first; equal logits by ascending id.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Ids of the kept tokens, ascending, never empty; `None` when all are kept.
pub(super) fn kept(logits: &[f32], top: f32, params: &SamplingParams) -> Option<Vec<u32>> {
    let top_k = params.top_k as usize;
    let by_count = top_k > 0 && top_k < logits.len();
    let by_mass = params.top_p < 1.0;
    if !by_count && !by_mass && params.min_p <= 0.0 {
        return None;
    }
    let mut left = if by_count {
        best_of(above(logits, kth_bound(logits, top_k)), top_k)
    } else if by_mass {
        above(logits, f32::NEG_INFINITY)
    } else {
        above(logits, min_p_bound(top, params))
    };
    if by_mass {
        left = nucleus(left, top, params);
    }
    let bound = min_p_bound(top, params);
    left.retain(|candidate| candidate.logit >= bound);
    let mut ids: Vec<u32> = left.into_iter().map(|candidate| candidate.id).collect();
    ids.sort_unstable();
    Some(ids)
}

fn above(logits: &[f32], bound: f32) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (id, &logit) in logits.iter().enumerate() {
        if logit >= bound {
            found.push(Candidate { id: id as u32, logit });
        }
    }
    found
}

/// A value that at least `k` logits reach: the `k`-th best of the maxima of disjoint stretches.
fn kth_bound(logits: &[f32], k: usize) -> f32 {
    let stretch = (logits.len() / (4 * k)).clamp(1, 256);
    let mut maxima: Vec<f32> = logits.chunks(stretch).map(weigh::maximum).collect();
    if maxima.len() < k {
        return f32::NEG_INFINITY;
    }
    let (_, bound, _) = maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    *bound
}

/// The `count` best, in no order.
fn best_of(mut candidates: Vec<Candidate>, count: usize) -> Vec<Candidate> {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, order);
        candidates.truncate(count);
    }
    candidates
}

/// Lowest logit that min-p keeps: `top + temperature · ln(min_p)`.
fn min_p_bound(top: f32, params: &SamplingParams) -> f32 {
    if params.min_p <= 0.0 {
        return f32::NEG_INFINITY;
    }
    let distance = f64::from(params.temperature) * f64::from(params.min_p.min(1.0)).ln();
    (f64::from(top) + distance) as f32
}

/// The smallest set of best tokens whose share of the candidates' weight reaches top-p.
fn nucleus(mut candidates: Vec<Candidate>, top: f32, params: &SamplingParams) -> Vec<Candidate> {
    let weight = |candidate: &Candidate| weigh::weight(candidate.logit, top, params.temperature);
    let weights: Vec<f64> = candidates.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let goal = f64::from(params.top_p) * total;
    // Tokens lighter than this weigh less than `total − goal` together, so those
    // from it upwards reach the goal without them. Half of it is far from rounding.
    let light = (total - goal) / candidates.len() as f64 / 2.0;
    let mut weights = weights.into_iter();
    candidates.retain(|_| weights.next().is_some_and(|weight| weight >= light));
    let (mut sum, mut ordered) = (0.0f64, 0);
    while ordered < candidates.len() {
        let rest = &mut candidates[ordered..];
        let run = rest.len().min((ordered * 3).max(64));
        if run < rest.len() {
            rest.select_nth_unstable_by(run, order);
        }
        rest[..run].sort_unstable_by(order);
        for (index, candidate) in rest[..run].iter().enumerate() {
            sum += weight(candidate);
            if sum >= goal {
                candidates.truncate(ordered + index + 1);
                return candidates;
            }
        }
        ordered += run;
    }
    candidates
}
