//! The sampler against exact probabilities and against a naive reading of each rule.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn params(change: impl FnOnce(&mut SamplingParams)) -> Arc<SamplingParams> {
    let mut params = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    change(&mut params);
    Arc::new(params)
}

fn draw(logits: &[f32], params: &Arc<SamplingParams>, position: u32, output: &[TokenId]) -> Drawn {
    Sampler::default().draw(logits, &SampleFor { params, position, output, scores: Some(0) }).unwrap()
}

fn ids(tokens: &[u32]) -> Vec<TokenId> {
    tokens.iter().map(|token| TokenId(*token)).collect()
}

/// Exact probabilities of `logits / temperature`.
fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - top) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Draws at positions `0..count` and compares the counts with `expected` by chi-square.
fn chi_square(logits: &[f32], params: &Arc<SamplingParams>, expected: &[f64], count: u32) -> f64 {
    let mut seen = vec![0u32; logits.len()];
    for position in 0..count {
        seen[draw(logits, params, position, &[]).token.0 as usize] += 1;
    }
    let mut sum = 0.0;
    for (seen, probability) in seen.iter().zip(expected) {
        if *probability == 0.0 {
            assert_eq!(*seen, 0, "a token without probability was drawn");
        } else {
            let mean = probability * f64::from(count);
            sum += (f64::from(*seen) - mean).powi(2) / mean;
        }
    }
    sum
}

#[test]
fn the_uniform_number_is_the_documented_one() {
    // Computed from the formula with integers of arbitrary size.
    for (seed, position, expected) in UNIFORM_EXAMPLES {
        assert_eq!(uniform(*seed, *position), *expected, "seed {seed} position {position}");
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let greedy = Arc::new(SamplingParams::greedy());
    assert_eq!(draw(&[1.0, 3.0, 3.0, 2.0], &greedy, 0, &[]).token, TokenId(1));
    assert_eq!(draw(&[-0.0, 0.0], &greedy, 0, &[]).token, TokenId(0));
    let by_top_k = params(|p| p.top_k = 1);
    assert_eq!(draw(&[1.0, 3.0, 3.0, 2.0], &by_top_k, 7, &[]).token, TokenId(1));
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.3f32, -1.0, 2.0, 1.1, 0.0, -3.0, 1.9, 0.7];
    for temperature in [0.5f32, 1.0, 2.5] {
        let sampled = params(|p| {
            p.temperature = temperature;
            p.seed = 42;
        });
        let statistic = chi_square(&logits, &sampled, &softmax(&logits, f64::from(temperature)), 20_000);
        assert!(statistic < 24.3, "chi-square with 7 degrees, p = 0.001: {statistic}");
    }
}

#[test]
fn draws_follow_the_filtered_distribution() {
    let logits = [0.3f32, -1.0, 2.0, 1.1, 0.0, -3.0, 1.9, 0.7];
    let filtered = params(|p| {
        p.top_k = 4;
        p.seed = 7;
    });
    let mut kept = logits;
    for id in [0, 1, 4, 5] {
        kept[id] = f32::NEG_INFINITY;
    }
    let statistic = chi_square(&logits, &filtered, &softmax(&kept, 1.0), 20_000);
    assert!(statistic < 16.3, "chi-square with 3 degrees, p = 0.001: {statistic}");
}

#[test]
fn seeds_give_independent_draws() {
    let logits = [0.0f32; 4];
    let mut seen = [0u32; 16];
    for seed in 0..8000 {
        let sampled = params(|p| p.seed = seed);
        let first = draw(&logits, &sampled, 10, &[]).token.0;
        let second = draw(&logits, &sampled, 11, &[]).token.0;
        seen[(first * 4 + second) as usize] += 1;
    }
    let statistic: f64 = seen.iter().map(|seen| (f64::from(*seen) - 500.0).powi(2) / 500.0).sum();
    assert!(statistic < 37.7, "chi-square with 15 degrees, p = 0.001: {statistic}");
}

#[test]
fn logprob_is_of_the_unmodified_distribution() {
    let logits = [1.0f32, 2.0, 0.5, -4.0];
    let exact = softmax(&logits, 1.0);
    let forced = params(|p| {
        p.logit_bias = vec![(TokenId(3), 100.0)];
        p.temperature = 0.2;
        p.top_k = 2;
    });
    let drawn = draw(&logits, &forced, 0, &[]);
    assert_eq!(drawn.token, TokenId(3));
    assert!((f64::from(drawn.scores.as_ref().unwrap().drawn) - exact[3].ln()).abs() < 1e-5);
    let best = draw(&logits, &Arc::new(SamplingParams::greedy()), 0, &[]);
    assert!((f64::from(best.scores.as_ref().unwrap().drawn) - exact[1].ln()).abs() < 1e-6);
}

#[test]
fn penalties_look_at_the_window_only() {
    let logits = [2.0f32, 1.9, 1.0];
    let output = ids(&[0, 0, 1]);
    let penalised = |change: fn(&mut SamplingParams)| {
        let mut greedy = SamplingParams::greedy();
        change(&mut greedy);
        draw(&logits, &Arc::new(greedy), 0, &output).token.0
    };
    assert_eq!(penalised(|_| ()), 0);
    assert_eq!(penalised(|p| p.frequency_penalty = 0.2), 1, "2 − 0.4 against 1.9 − 0.2");
    assert_eq!(penalised(|p| p.presence_penalty = 2.0), 2, "both were produced");
    assert_eq!(penalised(|p| p.repetition_penalty = 4.0), 2);
    assert_eq!(
        penalised(|p| {
            p.presence_penalty = 2.0;
            p.penalty_window = Some(1);
        }),
        0,
        "only the last token counts"
    );
    assert_eq!(
        penalised(|p| {
            p.presence_penalty = 2.0;
            p.penalty_window = Some(0);
        }),
        0
    );
}

#[test]
fn repetition_lowers_negative_logits_too() {
    let repeated = Arc::new(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() });
    assert_eq!(draw(&[-1.0, -1.5], &repeated, 0, &ids(&[0])).token, TokenId(1));
}

#[test]
fn penalties_leave_no_trace_for_the_next_row() {
    let mut sampler = Sampler::default();
    let penalised = Arc::new(SamplingParams { presence_penalty: 2.0, ..SamplingParams::greedy() });
    let logits = [1.0f32, 0.9];
    let output = ids(&[0, 0, 0]);
    let other = ids(&[1]);
    for (output, expected) in [(&output, 1), (&other, 0), (&output, 1)] {
        let wanted = SampleFor { params: &penalised, position: 0, output, scores: None };
        assert_eq!(sampler.draw(&logits, &wanted).unwrap().token, TokenId(expected));
    }
}

#[test]
fn ids_outside_the_vocabulary_are_passed_over() {
    let odd = Arc::new(SamplingParams {
        logit_bias: vec![(TokenId(u32::MAX), 5.0)],
        presence_penalty: 1.0,
        ..SamplingParams::greedy()
    });
    assert_eq!(draw(&[0.0, 1.0], &odd, 0, &ids(&[900])).token, TokenId(1));
}

#[test]
fn extremes_give_a_token() {
    let mut one = vec![f32::NEG_INFINITY; 1000];
    one[777] = -3.0e38;
    let many: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 10.0).collect();
    let settings: [fn(&mut SamplingParams); 8] = [
        |p| p.temperature = f32::MIN_POSITIVE,
        |p| p.temperature = 100.0,
        |p| p.top_p = 0.0,
        |p| p.top_p = 1e-9,
        |p| p.top_p = 0.999_999_9,
        |p| p.min_p = 1.0,
        |p| p.top_k = 999,
        |p| p.top_k = u32::MAX,
    ];
    for (index, setting) in settings.into_iter().enumerate() {
        let sampled = params(setting);
        assert_eq!(draw(&one, &sampled, 3, &[]).token, TokenId(777), "setting {index}");
        let token = draw(&many, &sampled, 3, &[]).token.0 as usize;
        if [0, 2, 3, 5].contains(&index) {
            assert_eq!(many[token], 99.9, "setting {index} keeps the best alone");
        }
    }
}

#[test]
fn values_that_are_no_numbers_are_refused() {
    let greedy = Arc::new(SamplingParams::greedy());
    let wanted = SampleFor { params: &greedy, position: 0, output: &[], scores: None };
    let mut rows = vec![vec![], vec![f32::NEG_INFINITY; 40]];
    for bad in [f32::NAN, f32::INFINITY] {
        for place in [0, 17, 39] {
            let mut row = vec![0.0; 40];
            row[place] = bad;
            rows.push(row);
        }
    }
    for row in rows {
        assert_eq!(Sampler::default().draw(&row, &wanted), Err(EngineError::NotANumber), "{row:?}");
    }
}

/// Logits on a coarse grid, so that equal ones are frequent.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-40i32..40).prop_map(|step| step as f32 / 8.0), 1..400)
}

/// All ids, best first, equal ones ascending.
fn ranked(logits: &[f32]) -> Vec<u32> {
    let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
    ranked.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    ranked
}

fn kept(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    keep::kept(logits, top, params).unwrap_or_else(|| (0..logits.len() as u32).collect())
}

proptest! {
    #[test]
    fn top_k_keeps_the_first_k(logits in rows(), top_k in 1u32..500) {
        let mut expected = ranked(&logits);
        expected.truncate(top_k as usize);
        expected.sort_unstable();
        prop_assert_eq!(kept(&logits, &params(|p| p.top_k = top_k)), expected);
    }

    #[test]
    fn top_p_keeps_the_smallest_set(
        logits in rows(), top_k in 0u32..80, top_p in 0.001f32..1.0, temperature in 0.1f32..4.0,
    ) {
        let mut candidates = ranked(&logits);
        if top_k > 0 {
            candidates.truncate(top_k as usize);
        }
        let left: Vec<f32> = candidates.iter().map(|id| logits[*id as usize]).collect();
        let probabilities = softmax(&left, f64::from(temperature));
        let kept = kept(&logits, &params(|p| {
            p.top_k = top_k;
            p.top_p = top_p;
            p.temperature = temperature;
        }));
        let mut expected = candidates[..kept.len()].to_vec();
        expected.sort_unstable();
        prop_assert_eq!(&kept, &expected, "not the best ones");
        let mass: f64 = probabilities[..kept.len()].iter().sum();
        let without_last = mass - probabilities[kept.len() - 1];
        prop_assert!(mass >= f64::from(top_p) - 1e-6, "{mass} does not reach {top_p}");
        prop_assert!(without_last < f64::from(top_p) + 1e-6, "{without_last} would do for {top_p}");
    }

    #[test]
    fn min_p_keeps_what_is_near_the_best(
        logits in rows(), min_p in 0.001f32..=1.0, temperature in 0.1f32..4.0,
    ) {
        let probabilities = softmax(&logits, f64::from(temperature));
        let best = probabilities.iter().copied().fold(0.0, f64::max);
        let kept = kept(&logits, &params(|p| {
            p.min_p = min_p;
            p.temperature = temperature;
        }));
        for id in 0..logits.len() as u32 {
            let ratio = probabilities[id as usize] / best;
            let inside = kept.binary_search(&id).is_ok();
            if (ratio - f64::from(min_p)).abs() > 1e-5 * f64::from(min_p) {
                prop_assert_eq!(inside, ratio > f64::from(min_p), "token {} of ratio {}", id, ratio);
            }
        }
    }

    #[test]
    fn a_draw_is_the_inverse_of_the_cumulative_distribution(
        logits in rows(), seed: u64, position: u32, top_k in 0u32..60, temperature in 0.2f32..3.0,
    ) {
        let sampled = params(|p| {
            p.seed = seed;
            p.top_k = top_k;
            p.temperature = temperature;
        });
        prop_assume!(!sampled.is_greedy());
        let mut masked = vec![f32::NEG_INFINITY; logits.len()];
        for id in kept(&logits, &sampled) {
            masked[id as usize] = logits[id as usize];
        }
        let probabilities = softmax(&masked, f64::from(temperature));
        let drawn = draw(&logits, &sampled, position, &[]).token.0 as usize;
        let below: f64 = probabilities[..drawn].iter().sum();
        let number = uniform(seed, position);
        prop_assert!(below <= number + 1e-6, "{below} is above {number}");
        prop_assert!(below + probabilities[drawn] >= number - 1e-6);
    }

    #[test]
    fn a_draw_depends_on_its_own_row_only(
        logits in rows(), other in rows(), seed: u64, position: u32, output in prop::collection::vec(0u32..400, 0..20),
    ) {
        let sampled = params(|p| {
            p.seed = seed;
            p.top_p = 0.9;
            p.repetition_penalty = 1.3;
            p.frequency_penalty = 0.4;
        });
        let output = ids(&output);
        let alone = draw(&logits, &sampled, position, &output);
        let mut shared = Sampler::default();
        let neighbour = SampleFor { params: &sampled, position: 3, output: &output, scores: None };
        shared.draw(&other, &neighbour).unwrap();
        let wanted = SampleFor { params: &sampled, position, output: &output, scores: Some(0) };
        prop_assert_eq!(shared.draw(&logits, &wanted).unwrap(), alone);
    }

    #[test]
    fn the_exponential_is_exact_enough(x in -86.0f32..=0.0) {
        let (own, exact) = (weigh::weight(x, 0.0, 1.0), f64::from(x).exp());
        prop_assert!((own - exact).abs() <= 2e-7 * exact, "e^{x}: {own} against {exact}");
    }

    #[test]
    fn penalties_match_the_naive_reading(
        logits in rows(),
        output in prop::collection::vec(0u32..400, 0..30),
        window in prop::option::of(0u32..40),
        repetition in 0.5f32..2.0, presence in -2.0f32..2.0, frequency in -2.0f32..2.0,
    ) {
        let output = ids(&output);
        let penalised = params(|p| {
            p.penalty_window = window;
            p.repetition_penalty = repetition;
            p.presence_penalty = presence;
            p.frequency_penalty = frequency;
        });
        let mut sampler = Sampler::default();
        sampler.change(&logits, &penalised, &output);
        let first = output.len() - output.len().min(window.map_or(usize::MAX, |w| w as usize));
        for (id, logit) in logits.iter().enumerate() {
            let count = output[first..].iter().filter(|token| token.0 as usize == id).count();
            let mut expected = *logit;
            if count > 0 {
                expected = if expected > 0.0 { expected / repetition } else { expected * repetition };
                expected = expected - presence - frequency * count as f32;
            }
            prop_assert_eq!(sampler.changed[id], expected);
        }
        prop_assert!(sampler.counts.iter().all(|count| *count == 0));
    }
}

/// Seed, position, number.
const UNIFORM_EXAMPLES: &[(u64, u32, f64)] = &[
    (0, 0, 0.6524484863740322),
    (1, 0, 0.36818951565166946),
    (0, 1, 0.7012121095215252),
    (42, 1000, 0.6952598398323256),
    (18446744073709551615, 4294967295, 0.774697827217258),
];
