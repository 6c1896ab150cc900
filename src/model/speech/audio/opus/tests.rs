//! Every mode against libopus, several streams in a packet, and damage.

use std::io::Cursor;

use symphonia::core::io::MediaSourceStream;

use super::*;

/// Two seconds in every mode, with what there is in a file.
const CLIPS: [(&str, u16); 10] = [
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
];

/// Every so many frames of what libopus decodes are kept.
const KEPT: usize = 97;

fn file(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/data/audio/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Header and packets.
fn clip(name: &str) -> (Vec<u8>, Vec<Vec<u8>>) {
    let stream = Box::new(Cursor::new(file(&format!("opus-{name}.opus"))));
    let stream = MediaSourceStream::new(stream, Default::default());
    let mut format = symphonia::default::get_probe()
        .probe(&Default::default(), stream, Default::default(), Default::default())
        .unwrap();
    let params = format.tracks()[0].codec_params.as_ref().and_then(|params| params.audio()).unwrap();
    let head = params.extra_data.as_deref().unwrap().to_vec();
    let packets = std::iter::from_fn(|| format.next_packet().unwrap()).map(|packet| packet.data.to_vec());
    (head, packets.collect())
}

fn decoded(head: &[u8], packets: &[Vec<u8>]) -> Vec<f32> {
    let mut opus = Opus::new(Some(head), None).unwrap();
    let (mut out, mut all) = (Vec::new(), Vec::new());
    for packet in packets {
        opus.decode(packet, &mut out).unwrap();
        all.extend_from_slice(&out);
    }
    all.drain(..usize::try_from(opus.pre_skip).unwrap() * usize::from(opus.channels));
    all
}

#[test]
fn every_mode_decodes_as_libopus_decodes_it() {
    let kept = file("opus-libopus.s16");
    let mut kept = kept.as_chunks::<2>().0.iter().map(|pair| f32::from(i16::from_le_bytes(*pair)) / 32768.0);
    for (name, channels) in CLIPS {
        let (head, packets) = clip(name);
        let heard = decoded(&head, &packets);
        let channels = usize::from(channels);
        assert!(heard.len() >= 96_000 * channels, "{name}: {} samples", heard.len());
        for (index, frame) in heard[..96_000 * channels].chunks_exact(channels).step_by(KEPT).enumerate() {
            for (channel, sample) in frame.iter().enumerate() {
                let wanted = kept.next().unwrap();
                let place = index * KEPT;
                assert!(
                    (sample - wanted).abs() < 1e-4,
                    "{name}, channel {channel} at {place}: {sample}, not {wanted}"
                );
            }
        }
    }
    assert_eq!(kept.next(), None);
}

#[test]
fn the_headers_gain_is_applied() {
    let (mut head, packets) = clip("silk-16k-60ms");
    let plain = decoded(&head, &packets);
    // -6.02 dB in 1/256 dB, at bytes 16 and 17.
    head[16..18].copy_from_slice(&(-1541i16).to_le_bytes());
    for (soft, loud) in decoded(&head, &packets).iter().zip(&plain) {
        assert!((soft * 2.0 - loud).abs() < 1e-3, "{soft} and {loud}");
    }
}

/// A packet with its length in it, as all streams but the last have it: one frame, or a few with padding.
fn delimited(frames: &[&[u8]], variable: bool, padding: usize) -> (Vec<u8>, Vec<u8>) {
    let size = |frame: &[u8]| match frame.len() {
        short @ 0..252 => vec![short as u8],
        long => vec![252 + (long & 3) as u8, ((long - (252 + (long & 3))) / 4) as u8],
    };
    let mut header = vec![(9 << 3) | 3, frames.len() as u8];
    if padding > 0 {
        header[1] |= 0x40;
        header.extend(std::iter::repeat_n(255, padding / 254));
        header.push((padding % 254) as u8);
    }
    let (last, others) = frames.split_last().unwrap();
    if variable {
        header[1] |= 0x80;
        others.iter().for_each(|frame| header.extend(size(frame)));
    }
    let body = [frames.concat(), vec![0; padding]].concat();
    ([&header[..], &size(last), &body].concat(), [&header[..], &body].concat())
}

#[test]
fn packets_of_several_streams_are_taken_apart() {
    let (short, long) = ([7u8; 100], [9u8; 1000]);
    let cases: [(&[&[u8]], bool, usize); 5] = [
        (&[&short], false, 0),
        (&[&long, &long], false, 0),
        (&[&short, &long, &short], true, 0),
        (&[&long, &short], true, 700),
        (&[&short, &short], false, 254),
    ];
    let mut plain = Vec::new();
    for (frames, variable, padding) in cases {
        let (packet, wanted) = delimited(frames, variable, padding);
        let both = [&packet[..], b"what follows"].concat();
        assert_eq!(take(&both, &mut plain), Some(packet.len()));
        assert_eq!(plain, wanted);
        assert!((0..packet.len()).all(|end| take(&packet[..end], &mut plain).is_none()));
    }
    // One frame; two of a size; two with sizes.
    assert_eq!(take(&[8, 2, 1, 2, 3], &mut plain), Some(4));
    assert_eq!(plain, [8, 1, 2]);
    assert_eq!(take(&[9, 2, 1, 2, 3, 4, 5], &mut plain), Some(6));
    assert_eq!(plain, [9, 1, 2, 3, 4]);
    assert_eq!(take(&[10, 1, 2, 1, 2, 3, 4], &mut plain), Some(6));
    assert_eq!(plain, [10, 1, 1, 2, 3]);
}

#[test]
fn channels_without_a_stream_are_silent_and_others_may_share_one() {
    let (mut head, packets) = clip("celt-48k-20ms-surround");
    let plain = decoded(&head, &packets);
    head[21..27].copy_from_slice(&[255, 1, 1, 255, 0, 5]);
    let heard = decoded(&head, &packets);
    // Of surround's order (0, 4, 1, 2, 3, 5), where the streams' channels were before.
    for (frame, before) in heard.chunks_exact(6).zip(plain.chunks_exact(6)) {
        assert_eq!(frame, [0.0, before[2], before[2], 0.0, before[0], before[5]]);
    }
}

#[test]
fn headers_that_make_no_sense_are_refused() {
    let head = clip("celt-48k-20ms-surround").0;
    for (at, byte) in [(9, 0), (9, 7), (18, 0), (19, 0), (19, 7), (19, 3), (20, 5), (21, 6)] {
        let mut wrong = head.clone();
        wrong[at] = byte;
        assert!(Opus::new(Some(&wrong), None).is_err(), "{byte} at {at}");
    }
    assert!(Opus::new(None, Some(3)).is_err());
    assert!(Opus::new(Some(&head[..24]), None).is_err());
    assert!(Opus::new(None, None).is_ok_and(|opus| opus.channels == 1));
}

#[test]
fn damaged_packets_never_panic_nor_get_loud() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = move |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit.max(1) as u64) as usize
    };
    let clips: Vec<_> = CLIPS.map(|(name, _)| clip(name)).into();
    let mut out = Vec::new();
    let (mut good, mut bad) = (0, 0);
    for (head, packets) in &clips {
        let mut opus = Opus::new(Some(head), None).unwrap();
        for _ in 0..800 {
            // Of any clip: the mode changes as well.
            let (_, others) = &clips[below(clips.len())];
            let from = if below(3) == 0 { others } else { packets };
            let mut packet = from[below(from.len())].clone();
            match below(6) {
                0 => packet = (0..below(1500)).map(|_| below(256) as u8).collect(),
                1 => packet.truncate(below(packet.len() + 1)),
                2 => packet[0] = below(256) as u8,
                3 => {}
                _ => (0..=below(8)).for_each(|_| {
                    let at = below(packet.len());
                    packet[at] ^= 1 << below(8);
                }),
            }
            match opus.decode(&packet, &mut out) {
                Ok(()) => good += 1,
                Err(why) => {
                    assert!(!why.is_empty() && out.is_empty());
                    bad += 1;
                }
            }
            assert!(out.len() <= MAX_PACKET_SAMPLES * usize::from(opus.channels));
            assert!(out.iter().all(|sample| sample.abs() <= 1.0), "a sample out of bounds");
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} good ones, {bad} bad ones");
}
