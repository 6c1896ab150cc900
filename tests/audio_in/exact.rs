//! Places and levels: the resampler and the mixer.

use crate::common::*;

#[test]
fn clicks_land_on_the_sample_and_lengths_are_exact() {
    for rate in [48_000u32, 44_100, 32_000, 24_000, 22_050, 16_000, 11_025, 8_000] {
        for length in [rate as usize * 2, rate as usize * 2 + 1, rate as usize + 777] {
            let mut samples = vec![0f32; length];
            let place = rate as usize * 4 / 5;
            samples[place] = 1.0;
            let heard = audio(float_wav(&samples, 1, rate));
            let wanted = (length as f64 * 16_000.0 / f64::from(rate)).round() as usize;
            assert_eq!(heard.len(), wanted, "{rate} Hz, {length} samples");
            assert!(peak(&heard).abs_diff(12_800) <= 1, "{rate} Hz: {}", peak(&heard));
        }
    }
}

#[test]
fn clips_shorter_than_a_block_keep_their_click() {
    for (rate, length) in [(44_100, 441), (48_000, 50), (8_000, 80), (44_100, 1)] {
        let mut samples = vec![0f32; length];
        samples[length / 2] = 1.0;
        let heard = audio(float_wav(&samples, 1, rate));
        assert_eq!(heard.len(), (length as f64 * 16_000.0 / f64::from(rate)).round() as usize);
        if length > 1 {
            let wanted = (length as f64 / 2.0 * 16_000.0 / f64::from(rate)) as usize;
            assert!(peak(&heard).abs_diff(wanted) <= 1);
        }
    }
}

#[test]
fn the_pass_band_is_flat_and_the_stop_band_is_silent() {
    for rate in [48_000, 44_100, 96_000, 32_000, 22_050, 24_000] {
        for hertz in [300.0, 3_000.0, 7_000.0, 7_200.0] {
            let heard = audio(float_wav(&sine(hertz, rate, 2.0), 1, rate));
            let level = 20.0 * (rms(&heard[4_000..28_000]) / (0.5 / 2f64.sqrt())).log10();
            assert!(level.abs() < 0.1, "{rate} Hz: {hertz} Hz comes out at {level:.2} dB");
        }
        for hertz in [8_500.0, 9_000.0, 10_500.0] {
            let heard = audio(float_wav(&sine(hertz, rate, 2.0), 1, rate));
            let level = 20.0 * (rms(&heard[4_000..28_000]) / (0.5 / 2f64.sqrt())).max(1e-12).log10();
            assert!(level < -80.0, "{rate} Hz: {hertz} Hz comes out at {level:.1} dB");
        }
    }
}

fn stereo(left: &[f32], right: impl Fn(usize) -> f32) -> Vec<f32> {
    left.iter().enumerate().flat_map(|(index, sample)| [*sample, right(index)]).collect()
}

#[test]
fn channels_of_opposite_phase_do_not_cancel() {
    let left = sine(440.0, 48_000, 2.0);
    let heard = audio(float_wav(&stereo(&left, |index| -left[index]), 2, 48_000));
    assert!((rms(&heard[100..31_900]) - rms(&left)).abs() < 0.01);
    // The louder one is taken.
    let heard = audio(float_wav(&stereo(&left, |index| -left[index] * 0.9), 2, 48_000));
    assert!((rms(&heard[100..31_900]) - rms(&left)).abs() < 0.01);
}

#[test]
fn a_mix_is_the_mean_otherwise() {
    let left = sine(440.0, 16_000, 1.0);
    let heard = audio(float_wav(&stereo(&left, |index| left[index]), 2, 16_000));
    assert_eq!(heard, left);
    let heard = audio(float_wav(&stereo(&left, |_| 0.0), 2, 16_000));
    assert!(heard.iter().zip(&left).all(|(a, b)| (a - b / 2.0).abs() < 1e-6));
    let six: Vec<f32> = left.iter().flat_map(|sample| [*sample, 0.0, 0.0, *sample, *sample, 0.0]).collect();
    let heard = audio(float_wav(&six, 6, 16_000));
    assert!(heard.iter().zip(&left).all(|(a, b)| (a - b / 2.0).abs() < 1e-6));
}

#[test]
fn a_change_of_phase_does_not_click() {
    // In phase for a second, then opposite.
    let left = sine(440.0, 16_000, 2.0);
    let turned = |index: usize| if index < 16_000 { left[index] } else { -left[index] };
    let heard = audio(float_wav(&stereo(&left, turned), 2, 16_000));
    let steepest =
        |samples: &[f32]| samples.windows(2).map(|pair| (pair[1] - pair[0]).abs()).fold(0.0, f32::max);
    assert!(steepest(&heard) < 1.5 * steepest(&left) + 0.1);
    assert!(rms(&heard[24_000..]) > 0.3);
}
