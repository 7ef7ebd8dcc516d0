//! Lives of the machines: crashes, restarts, and machines that are written down and read back in the middle of their work.

use penstock_base::codec::{Reader, Writer};

use super::*;

impl World {
    /// The machine that is read back takes the place of the one that was written.
    pub(super) fn copy(&mut self, party: Party) {
        let (mut out, epoch, timing) = (Writer::new(), self.epochs[party as usize], self.spec.timing);
        match party {
            Party::Coordinator => self.coordinator.encode(&mut out),
            Party::Sender => self.sender.encode(&mut out),
            Party::Receiver => self.receiver.encode(&mut out),
        }
        let bytes = out.into_bytes();
        let (from, mut again) = (&mut Reader::new(&bytes), Writer::new());
        match party {
            Party::Coordinator => {
                let config = coordinator_config(epoch as u16, timing);
                self.coordinator = Coordinator::decode(config, from).expect("it was just written");
                self.coordinator.encode(&mut again);
            }
            Party::Sender => {
                self.sender = Sender::decode(config(party, epoch, timing), from).expect("it was just written");
                self.sender.encode(&mut again);
            }
            Party::Receiver => {
                self.receiver = Receiver::decode(config(party, epoch, timing), from).expect("it was just written");
                self.receiver.encode(&mut again);
            }
        }
        if from.remaining() > 0 || again.bytes() != bytes {
            self.fail("what is read back is another machine");
        }
    }

    pub(super) fn crash(&mut self, party: Party, down: Duration) {
        self.down[party as usize] = true;
        self.epochs[party as usize] += 1;
        let epoch = self.epochs[party as usize];
        let timing = self.spec.timing;
        match party {
            Party::Coordinator => {
                let open = self
                    .by_request
                    .iter()
                    .filter(|(request, (_, _, of))| *of == epoch - 1 && !self.outcome.ends.contains_key(request));
                self.outcome.lost_with_coordinator += open.count() as u32;
                self.coordinator = coordinator(epoch as u16, timing);
            }
            Party::Sender => {
                self.sender = Sender::new(config(party, epoch, timing), self.now);
                (self.sender_kv, self.prompts) = (pool(), BTreeMap::new());
            }
            Party::Receiver => {
                self.receiver = Receiver::new(config(party, epoch, timing), self.now);
                (self.receiver_kv, self.running) = (pool(), BTreeMap::new());
            }
        }
        self.calm = self.calm.max(self.now + down);
        self.put(self.now + down, Item::Restart(party));
    }

    pub(super) fn restart(&mut self, party: Party) {
        self.down[party as usize] = false;
        if !self.spec.discovery {
            return;
        }
        let epoch = self.epochs[party as usize];
        match party {
            Party::Coordinator => {
                let gone = GatewayEpoch(epoch as u16 - 1);
                self.post(party, Party::Sender, Item::Sender(SenderEvent::GatewayDown(gone)));
                self.post(party, Party::Receiver, Item::Receiver(ReceiverEvent::GatewayDown(gone)));
            }
            Party::Sender => {
                let up = peer(party, epoch);
                self.post(party, Party::Coordinator, Item::Coordinator(CoordinatorEvent::PeerUp(up)));
                self.post(party, Party::Receiver, Item::Receiver(ReceiverEvent::PeerUp(up)));
            }
            Party::Receiver => {
                let up = peer(party, epoch);
                self.post(party, Party::Coordinator, Item::Coordinator(CoordinatorEvent::PeerUp(up)));
                self.post(party, Party::Sender, Item::Sender(SenderEvent::PeerUp(up)));
            }
        }
    }
}

fn coordinator_config(epoch: u16, timing: Timing) -> CoordinatorConfig {
    CoordinatorConfig { epoch: GatewayEpoch(epoch), timing, leases: LeaseTerms::default(), transfers: 16 }
}

pub(super) fn coordinator(epoch: u16, timing: Timing) -> Coordinator {
    Coordinator::new(coordinator_config(epoch, timing), Instant::ZERO)
}
