//! Opus: packets to samples. Containers carry what to skip in front; symphonia has no decoder.

use opus_pure::{MAX_PACKET_SAMPLES, OpusDecoder};

/// Opus always decodes to this rate here.
pub(super) const RATE: u32 = 48_000;

/// In a channel's place in the mapping: it is silent.
const SILENT: u8 = 255;

/// The decoder of what may be several streams: surround sound has one for every pair of channels and for
/// every single one.
pub(super) struct Opus {
    streams: Vec<OpusDecoder>,
    /// So many streams in front have two channels.
    coupled: usize,
    /// For each channel, which of the streams' channels it is.
    mapping: Vec<u8>,
    /// Channels of what comes out.
    pub(super) channels: u16,
    /// Frames in front that belong to the encoder.
    pub(super) pre_skip: u64,
    /// One stream's packet.
    plain: Vec<u8>,
    /// One stream's samples.
    decoded: Vec<f32>,
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
        let width = usize::from(channels);
        let (streams, coupled, mapping) = if byte(18).unwrap_or(0) == 0 {
            (1, width.saturating_sub(1), vec![0, 1])
        } else {
            let mapping = head.get(21..21 + width).ok_or("the Opus header is cut off")?;
            (usize::from(byte(19).unwrap_or(0)), usize::from(byte(20).unwrap_or(0)), mapping.to_vec())
        };
        let exists = |index: &u8| *index == SILENT || usize::from(*index) < streams + coupled;
        // More streams than channels would be decoded for nothing.
        if !(1..=width).contains(&streams) || coupled > streams || !mapping.iter().take(width).all(exists) {
            return Err(format!(
                "the Opus header makes no sense: {channels} channels of {streams} streams, {coupled} in stereo"
            ));
        }
        let gain = i32::from(number(16).cast_signed());
        let streams = (0..streams).map(|index| {
            let mut decoder = OpusDecoder::new(RATE.cast_signed(), if index < coupled { 2 } else { 1 })?;
            decoder.gain_q8 = gain;
            Ok(decoder)
        });
        let streams = streams.collect::<Result<_, opus_pure::Error>>().map_err(|error| error.to_string())?;
        let pre_skip = u64::from(number(10));
        Ok(Self { streams, coupled, mapping, channels, pre_skip, plain: Vec::new(), decoded: Vec::new() })
    }

    /// Decodes one packet into `out` (interleaved), which is overwritten.
    pub(super) fn decode(&mut self, packet: &[u8], out: &mut Vec<f32>) -> Result<(), String> {
        out.clear();
        let result = self.decode_streams(packet, out);
        if result.is_err() {
            out.clear();
        }
        // Damaged packets decode to anything, and features are scaled by the loudest sample near them.
        out.iter_mut().for_each(|sample| *sample = super::finite(*sample).clamp(-1.0, 1.0));
        result
    }

    fn decode_streams(&mut self, mut packet: &[u8], out: &mut Vec<f32>) -> Result<(), String> {
        let (channels, last) = (usize::from(self.channels), self.streams.len() - 1);
        let mut frames = None;
        for (index, decoder) in self.streams.iter_mut().enumerate() {
            let part = if index == last {
                packet
            } else {
                let taken = take(packet, &mut self.plain).ok_or("a packet of several streams is cut off")?;
                packet = packet.get(taken..).unwrap_or_default();
                &self.plain
            };
            // For the decoder an empty packet is a lost one, to be made up for.
            if part.is_empty() {
                return Err("an empty packet".to_owned());
            }
            let width = decoder.channels();
            self.decoded.resize(MAX_PACKET_SAMPLES * width, 0.0);
            let count = decoder
                .decode(part, MAX_PACKET_SAMPLES, &mut self.decoded)
                .map_err(|error| error.to_string())?;
            if *frames.get_or_insert(count) != count {
                return Err("streams of different lengths in a packet".to_owned());
            }
            out.resize(count * channels, 0.0);
            let (first, side_by_side) = match index.checked_sub(self.coupled) {
                Some(single) => (2 * self.coupled + single, 1),
                None => (2 * index, 2),
            };
            for (channel, from) in self.mapping.iter().take(channels).enumerate() {
                let Some(side) = usize::from(*from).checked_sub(first) else { continue };
                if *from == SILENT || side >= side_by_side {
                    continue;
                }
                let samples = self.decoded.iter().skip(side).step_by(width);
                for (to, sample) in out.iter_mut().skip(channel).step_by(channels).zip(samples) {
                    *to = *sample;
                }
            }
        }
        Ok(())
    }
}

/// Takes the packet of one stream off the front of a packet of several, where it says itself how long it
/// is (RFC 6716, appendix B). `plain` becomes the same without that; what comes back is how long it was.
fn take(packet: &[u8], plain: &mut Vec<u8>) -> Option<usize> {
    let mut at = 1;
    // Bytes of frames with a size of their own and of padding, and how many frames are as long as the last.
    let (mut others, mut alike) = (0, 1);
    match packet.first()? & 3 {
        0 => {}
        1 => alike = 2,
        2 => others = size(packet, &mut at)?,
        _ => {
            let byte = next(packet, &mut at)?;
            let mut more = byte & 0x40 != 0;
            while more {
                let padding = next(packet, &mut at)?;
                more = padding == 255;
                others += usize::from(padding.min(254));
            }
            let frames = usize::from(byte & 0x3f);
            if byte & 0x80 == 0 {
                alike = frames;
            } else {
                for _ in 1..frames {
                    others += size(packet, &mut at)?;
                }
            }
        }
    }
    let header = packet.get(..at)?;
    let last = size(packet, &mut at)?;
    let end = at + others + alike * last;
    plain.clear();
    plain.extend_from_slice(header);
    plain.extend_from_slice(packet.get(at..end)?);
    Some(end)
}

/// The size of a frame (RFC 6716, 3.2.1).
fn size(packet: &[u8], at: &mut usize) -> Option<usize> {
    let first = usize::from(next(packet, at)?);
    if first < 252 { Some(first) } else { Some(first + 4 * usize::from(next(packet, at)?)) }
}

fn next(packet: &[u8], at: &mut usize) -> Option<u8> {
    let byte = packet.get(*at).copied();
    *at += 1;
    byte
}

#[cfg(test)]
mod tests;
