//! What became of the packets of a recording, and what there is to say about it at the end.

use symphonia::core::packet::Packet;

/// Packets in a row without a sample after which a file is taken for hostile.
const MOST_IDLE: u32 = 200_000;

/// So many more bad packets than good ones, and the rest need not be tried.
const MOST_BAD: u64 = 2_000;

/// Counts of packets and frames.
#[derive(Debug, Default)]
pub(super) struct Tally {
    promised: Option<u64>,
    is_timed: bool,
    good: u64,
    bad: u64,
    /// Packets since the last sample.
    idle: u32,
    /// Frames decoded.
    decoded: u64,
    /// When the next packet is due, in the track's units.
    due: Option<i64>,
    /// Places where packets are missing.
    gaps: u64,
}

impl Tally {
    /// `promised` are the frames, at the file's rate, that an exact header says there are; `is_timed`
    /// is whether packets have exact times, and the reader passes over damaged ones without a word.
    pub(super) fn new(promised: Option<u64>, is_timed: bool) -> Self {
        Self { promised, is_timed, ..Self::default() }
    }

    /// Looks whether anything is missing in front of a packet.
    pub(super) fn arrived(&mut self, packet: &Packet) {
        if !self.is_timed {
            return;
        }
        let (start, length) = (packet.pts.get(), packet.block_dur().get().try_into().unwrap_or(0i64));
        self.gaps += u64::from(self.due.is_some_and(|due| start > due.saturating_add(length)));
        self.due = Some(start.saturating_add(length));
    }

    /// A packet was decoded, to so many frames.
    pub(super) fn good(&mut self, frames: usize) {
        self.good += 1;
        self.decoded += frames as u64;
        if frames > 0 {
            self.idle = 0;
        }
    }

    /// A packet could not be decoded. False when there is no point in going on.
    pub(super) fn bad(&mut self) -> bool {
        self.bad += 1;
        self.bad <= self.good + MOST_BAD
    }

    /// Nothing came of a packet: fine, but not for ever. False when there is no point in going on.
    pub(super) fn idled(&mut self) -> bool {
        self.idle += 1;
        self.idle <= MOST_IDLE
    }

    /// Another recording follows, with times of its own.
    pub(super) fn restarted(&mut self) {
        self.due = None;
    }

    /// Whether any packet was decoded.
    pub(super) fn any_good(&self) -> bool {
        self.good > 0
    }

    /// What to say if more packets were bad than good.
    pub(super) fn mostly_bad(&self) -> Option<String> {
        (self.bad > self.good).then(|| self.counts())
    }

    /// What was not as it should be, if anything.
    pub(super) fn remark(&self) -> Option<String> {
        let promised = self.promised.unwrap_or(0);
        // An encoder's frame or two may be cut off at either end.
        if self.decoded + 2 * 1152 < promised {
            Some(format!("the file ends early: {} of {promised} samples are there", self.decoded))
        } else if self.bad > 0 {
            Some(self.counts())
        } else if self.gaps > 0 {
            Some(format!("parts are missing in {} places", self.gaps))
        } else {
            None
        }
    }

    fn counts(&self) -> String {
        format!("{} of {} packets could not be decoded", self.bad, self.bad + self.good)
    }
}
