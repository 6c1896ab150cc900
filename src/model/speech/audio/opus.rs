//! Opus: packets to samples. Containers carry what to skip in front; symphonia has no decoder.

use opus_decoder::{OpusDecoder, OpusMultistreamDecoder};

/// Opus always decodes to this rate here.
pub(super) const RATE: u32 = 48_000;

/// Most frames of a packet: 120 ms.
const LONGEST: usize = 5760;

/// A stream's decoder.
pub(super) struct Opus {
    streams: Streams,
    /// Channels of what comes out.
    pub(super) channels: u16,
    /// Frames in front that belong to the encoder.
    pub(super) pre_skip: u64,
    gain: f32,
}

enum Streams {
    One(Box<OpusDecoder>),
    Many(Box<OpusMultistreamDecoder>),
}

impl Opus {
    /// From the identification header (`OpusHead`), which MP4 stores with numbers the other way round.
    pub(super) fn new(head: Option<&[u8]>, channels: Option<u16>) -> Result<Self, String> {
        let head = head.unwrap_or_default();
        let byte = |at: usize| head.get(at).copied();
        let swapped = byte(8) == Some(0);
        let number = |at: usize| -> u16 {
            let pair = [byte(at).unwrap_or(0), byte(at + 1).unwrap_or(0)];
            if swapped { u16::from_be_bytes(pair) } else { u16::from_le_bytes(pair) }
        };
        let channels = byte(9).map(u16::from).or(channels).unwrap_or(1);
        let streams = if byte(18).unwrap_or(0) == 0 {
            OpusDecoder::new(RATE, usize::from(channels)).map(|decoder| Streams::One(Box::new(decoder)))
        } else {
            let mapping = head.get(21..21 + usize::from(channels)).ok_or("the Opus header is cut off")?;
            let count = |at: usize| usize::from(byte(at).unwrap_or(0));
            OpusMultistreamDecoder::new(RATE, usize::from(channels), count(19), count(20), mapping)
                .map(|decoder| Streams::Many(Box::new(decoder)))
        };
        let streams = streams.map_err(|error| format!("the Opus header makes no sense: {error}"))?;
        let gain = 10f32.powf(f32::from(number(16) as i16) / (20.0 * 256.0));
        Ok(Self { streams, channels, pre_skip: u64::from(number(10)), gain })
    }

    /// Decodes one packet into `out` (interleaved), which is overwritten.
    pub(super) fn decode(&mut self, packet: &[u8], out: &mut Vec<f32>) -> Result<(), String> {
        // For the decoder an empty packet is a lost one, to be made up for.
        if packet.is_empty() {
            return Err("an empty packet".to_owned());
        }
        out.clear();
        out.resize(LONGEST * usize::from(self.channels), 0.0);
        let frames = match &mut self.streams {
            Streams::One(decoder) => decoder.decode_float(packet, out, false),
            Streams::Many(decoder) => decoder.decode_float(packet, out, false),
        };
        let frames = frames.map_err(|error| {
            out.clear();
            error.to_string()
        })?;
        out.truncate(frames * usize::from(self.channels));
        if self.gain != 1.0 {
            out.iter_mut().for_each(|sample| *sample *= self.gain);
        }
        Ok(())
    }
}
