//! Every format gives the same audio.

use crate::common::*;

#[test]
fn every_form_of_a_clip_is_the_same_audio() {
    let wanted = audio(clip("jfk.wav"));
    assert_eq!(wanted.len(), 176_000);
    for name in CLIPS {
        let (heard, info, warning) = decode(clip(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (lag, alike) = best_lag(&wanted, &heard, 800);
        println!("{name}: {info:?}, {} samples, lag {lag}, correlation {alike:.4}, {warning:?}", heard.len());
        assert!(alike > 0.9, "{name}: correlation {alike} at {lag}");
        assert!(heard.len().abs_diff(wanted.len()) <= 1600, "{name}: {} samples", heard.len());
        assert_eq!(warning, None, "{name}");
    }
}

#[test]
fn encoders_lead_in_and_padding_are_cut_off_where_the_file_says_so() {
    let wanted = audio(clip("jfk.wav"));
    for name in ["jfk.flac", "jfk.m4a", "jfk.mp3", "jfk.ogg", "jfk.opus", "jfk.webm"] {
        let heard = audio(clip(name));
        let (lag, _) = best_lag(&wanted, &heard, 800);
        assert!(lag.abs() <= 2, "{name}: {lag} samples late");
    }
    for name in ["jfk.flac", "jfk.m4a", "jfk.mp3", "jfk.ogg", "jfk.opus"] {
        assert_eq!(audio(clip(name)).len(), wanted.len(), "{name}");
    }
}

#[test]
fn containers_and_codecs_have_names() {
    let names = |name: &str| {
        let info = decode(clip(name)).unwrap_or_else(|error| panic!("{name}: {error}")).1;
        (info.container, info.codec, info.channels, info.rate)
    };
    assert_eq!(names("jfk.wav"), ("wav", "pcm_s16le".to_owned(), 1, 16_000));
    assert_eq!(names("jfk-stereo-44k.mp3"), ("mp3", "mp3".to_owned(), 2, 44_100));
    assert_eq!(names("jfk.m4a").0, "mp4");
    assert_eq!(names("jfk.m4a").1, "aac");
    assert_eq!(names("jfk.opus"), ("ogg", "opus".to_owned(), 1, 48_000));
    assert_eq!(names("jfk.webm").1, "opus");
    assert_eq!(names("jfk.webm").0, "webm");
}

#[test]
fn stereo_at_48_khz_with_24_bits() {
    let wanted = audio(clip("jfk.wav"));
    let heard = audio(clip("jfk5s-stereo-48k-s24.wav"));
    assert_eq!(heard.len(), 80_000);
    let (lag, alike) = best_lag(&wanted[..80_000], &heard, 800);
    assert!(alike > 0.9 && lag.abs() <= 2, "{alike} at {lag}");
}

#[test]
fn opus_of_every_mode_is_the_same_audio() {
    // The clips are these two seconds.
    let wanted = &audio(clip("jfk.wav"))[4_800..36_800];
    for (name, channels) in [
        ("silk-8k-20ms", 1),
        ("silk-12k-40ms", 1),
        ("silk-16k-60ms", 1),
        ("silk-16k-20ms-stereo", 2),
        ("hybrid-24k-20ms", 1),
        ("hybrid-48k-60ms-stereo", 2),
        ("celt-48k-2.5ms", 1),
        ("celt-48k-10ms-stereo", 2),
        ("celt-48k-120ms-stereo", 2),
        ("celt-48k-20ms-surround", 6),
    ] {
        let (heard, info, warning) =
            decode(clip(&format!("opus-{name}.opus"))).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((info.codec.as_str(), info.channels, info.rate), ("opus", channels, 48_000), "{name}");
        assert_eq!((heard.len(), warning), (wanted.len(), None), "{name}");
        let (lag, alike) = best_lag(wanted, &heard, 100);
        println!("{name}: lag {lag}, correlation {alike:.4}");
        assert!(alike > 0.9 && lag.abs() <= 2, "{name}: {alike} at {lag}");
    }
}

#[test]
fn joined_ogg_files_are_read_to_the_end() {
    for name in ["jfk.opus", "jfk.ogg"] {
        let one = audio(clip(name));
        let (both, _, warning) =
            decode([clip(name), clip(name)].concat()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(warning, None, "{name}");
        assert!(both.len().abs_diff(2 * one.len()) <= 2, "{name}: {} and {}", both.len(), one.len());
        let (lag, alike) = best_lag(&one, &both[one.len()..], 100);
        assert!(alike > 0.99 && lag.abs() <= 2, "{name}: {alike} at {lag}");
    }
}

#[test]
fn joined_mp3s_of_different_rates_are_read_to_the_end() {
    let (first, second) = (audio(clip("jfk.mp3")), audio(clip("jfk-stereo-44k.mp3")));
    let (both, info, warning) = decode([clip("jfk.mp3"), clip("jfk-stereo-44k.mp3")].concat())
        .unwrap_or_else(|error| panic!("{error}"));
    println!("{} + {} = {}, {warning:?}", first.len(), second.len(), both.len());
    assert_eq!((info.rate, info.channels), (44_100, 2));
    assert!(both.len().abs_diff(first.len() + second.len()) <= 1600);
    let (lag, alike) = best_lag(&second, &both[first.len()..], 1600);
    assert!(alike > 0.98, "{alike} at {lag}");
}

#[test]
fn tags_in_front_and_junk_behind_do_not_matter() {
    let mut tag = b"ID3\x04\x00\x00\x00\x00\x3f\x76".to_vec();
    tag.resize(10 + 0x3f * 128 + 0x76, 0);
    let plain = audio(clip("jfk.mp3"));
    let tagged = audio([&tag[..], &clip("jfk.mp3"), &[0u8; 777]].concat());
    assert_eq!(tagged.len(), plain.len());
    // Begins in the middle of a frame.
    let late = audio(clip("jfk.mp3").slice(1000..));
    let (_, alike) = best_lag(&plain, &late, 4000);
    assert!(alike > 0.9, "{alike}");
}
