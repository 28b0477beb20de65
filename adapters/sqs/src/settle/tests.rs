use onlyonce::event::RawEvent;
use onlyonce::source::Redelivery;
use proptest::prelude::*;

use super::*;

const VISIBILITY: Duration = Duration::from_secs(30);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn arrivals(names: &[&str]) -> Vec<Arrival> {
    names
        .iter()
        .map(|name| Arrival {
            handle: (*name).to_owned(),
            // a1, a2: of the group a. A name without a number has none.
            group: (name.len() > 1).then(|| name[..1].to_owned()),
            redelivery: Redelivery::No,
            events: vec![RawEvent::default()],
        })
        .collect()
}

/// All of these, received and handed out at `now`.
fn in_hand(now: Instant, names: &[&str]) -> (Ledger, Vec<Delivery>) {
    let mut ledger = Ledger::new(VISIBILITY);
    ledger.arrived(now, arrivals(names));
    let deliveries = ledger.hand_out(names.len());
    (ledger, deliveries)
}

fn changes(ledger: &mut Ledger, now: Instant) -> Vec<(String, i32)> {
    ledger.tick(now);
    let entries = ledger.next_changes(now);
    entries.into_iter().map(|e| (e.handle, e.seconds)).collect()
}

fn deletions(ledger: &mut Ledger) -> Vec<String> {
    let entries = ledger.next_deletions();
    entries.into_iter().map(|e| e.handle).collect()
}

fn of(handle: &str, seconds: i32) -> (String, i32) {
    (handle.to_owned(), seconds)
}

#[test]
fn what_is_in_hand_is_renewed_from_the_moment_of_the_call() {
    let now = Instant::now();
    let mut ledger = Ledger::new(VISIBILITY);
    ledger.arrived(now, arrivals(&["x", "y"]));
    assert_eq!(ledger.wake_at(), Some(now + seconds(10)), "also while it waits");
    assert_eq!(changes(&mut ledger, now + seconds(9)), []);
    ledger.tick(now + seconds(12));
    let entries = ledger.next_changes(now + seconds(12));
    assert_eq!(entries.len(), 2);
    // Sent at 12, answered at 17: good until 42.
    for entry in &entries {
        ledger.changed(now + seconds(17), now + seconds(12), entry, Answer::Done);
    }
    assert_eq!(ledger.wake_at(), Some(now + seconds(22)));
    ledger.tick(now + seconds(22));
    assert_eq!(ledger.next_changes(now + seconds(22)).len(), 2);
    ledger.tick(now + seconds(41));
    assert_eq!(ledger.waiting(), 2);
    ledger.tick(now + seconds(42));
    assert_eq!((ledger.waiting(), ledger.is_empty()), (0, true), "no answer came");
    assert_eq!(ledger.take_lost(), [], "nobody had them");
}

#[test]
fn a_renewal_that_is_due_takes_along_what_is_due_soon() {
    let now = Instant::now();
    let mut ledger = Ledger::new(VISIBILITY);
    ledger.arrived(now, arrivals(&["x"]));
    ledger.arrived(now + seconds(2), arrivals(&["y"]));
    ledger.arrived(now + seconds(5), arrivals(&["z"]));
    assert_eq!(
        changes(&mut ledger, now + seconds(10)),
        [of("x", 30), of("y", 30)]
    );
}

#[test]
fn a_void_handle_is_lost_at_once_and_its_group_with_it() {
    let now = Instant::now();
    let (mut ledger, _deliveries) = in_hand(now, &["a1", "b1", "a2"]);
    ledger.arrived(now + seconds(1), arrivals(&["a3", "b2"]));
    ledger.tick(now + seconds(10));
    let renewals = ledger.next_changes(now + seconds(10));
    assert_eq!(renewals.len(), 5);
    for entry in &renewals {
        let answer = match entry.handle.as_str() {
            "a1" => Answer::Gone,
            _ => Answer::Done,
        };
        ledger.changed(now + seconds(10), now + seconds(10), entry, answer);
    }
    assert_eq!(ledger.take_lost(), [Receipt(1), Receipt(3)], "a1 and a2");
    assert_eq!(
        changes(&mut ledger, now + seconds(10)),
        [of("a2", 0), of("a3", 0)]
    );
    assert_eq!(ledger.hand_out(9).len(), 1, "b goes on");
}

#[test]
fn what_follows_a_released_message_of_its_group_goes_back_with_it() {
    let now = Instant::now();
    let (mut ledger, mut deliveries) = in_hand(now, &["a1", "a2", "b1", "a3", "x"]);
    ledger.arrived(now, arrivals(&["a4", "b2"]));
    // The consumer gives a2 back by itself, in the same call as a1.
    let (a1, a2) = (deliveries.remove(0), deliveries.remove(0));
    ledger.settle(now, vec![a1.release(Some(seconds(7))), a2.release(None)]);
    assert_eq!(ledger.take_lost(), [Receipt(4)], "a3, and not what was settled");
    let told = [of("a1", 7), of("a2", 0), of("a3", 0), of("a4", 0)];
    assert_eq!(changes(&mut ledger, now), told);
    let waiting = ledger.hand_out(9);
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].receipt, Receipt(7), "b2");
    let a3 = deliveries.remove(1);
    ledger.settle(now, vec![a3.ack()]);
    assert_eq!(deletions(&mut ledger), Vec::<String>::new(), "it was lost");
}

#[test]
fn what_has_no_group_is_released_alone() {
    let now = Instant::now();
    let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
    ledger.settle(
        now,
        vec![deliveries.remove(0).release(Some(Duration::from_millis(1500)))],
    );
    assert_eq!(changes(&mut ledger, now), [of("x", 2)], "rounded up");
    assert_eq!(ledger.take_lost(), []);
    assert_eq!(ledger.outstanding(), 1);
}

#[test]
fn a_verdict_waits_for_the_call_under_way() {
    let now = Instant::now();
    let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
    let at = now + seconds(10);
    ledger.tick(at);
    let renewals = ledger.next_changes(at);
    let (x, y) = (deliveries.remove(0), deliveries.remove(0));
    ledger.settle(at, vec![x.release(None), y.ack()]);
    assert_eq!(changes(&mut ledger, at), [], "a renewal behind it would hide it");
    assert_eq!(deletions(&mut ledger), Vec::<String>::new());
    for entry in &renewals {
        ledger.changed(at, at, entry, Answer::Done);
    }
    assert_eq!(changes(&mut ledger, at), [of("x", 0)]);
    assert_eq!(deletions(&mut ledger), ["y"]);
}

#[test]
fn failed_entries_are_repeated_alone_and_slower_until_the_visibility_ends() {
    let now = Instant::now();
    let (mut ledger, deliveries) = in_hand(now, &["x", "y"]);
    ledger.settle(now, deliveries.into_iter().map(Delivery::ack).collect());
    let entries = ledger.next_deletions();
    ledger.deleted(now, entries[0].number, Answer::Done);
    ledger.deleted(now, entries[1].number, Answer::Again);
    let mut at = now;
    let mut tries = 0;
    while let Some(next) = ledger.wake_at() {
        assert!(next >= at, "time goes on");
        at = next;
        ledger.tick(at);
        for entry in ledger.next_deletions() {
            assert_eq!(entry.handle, "y");
            tries += 1;
            ledger.deleted(at, entry.number, Answer::Again);
        }
    }
    assert!((8..20).contains(&tries), "{tries} tries");
    assert_eq!(at, now + VISIBILITY);
    assert_eq!((ledger.acks_lost(), ledger.is_empty()), (1, true));
}

#[test]
fn nothing_is_held_for_more_than_twelve_hours() {
    let now = Instant::now();
    let (mut ledger, mut deliveries) = in_hand(now, &["x", "y"]);
    let mut renewals = 0;
    let mut at = now;
    while at < now + LONGEST_HOLD - seconds(60) {
        at = ledger.wake_at().unwrap();
        ledger.tick(at);
        for entry in ledger.next_changes(at) {
            renewals += 1;
            assert!(at + seconds(entry.seconds as u64) <= now + LONGEST_HOLD);
            ledger.changed(at, at, &entry, Answer::Done);
        }
    }
    assert!(renewals > 8000, "{renewals}");
    ledger.settle(at, vec![deliveries.remove(1).release(Some(seconds(3600)))]);
    let entry = ledger.next_changes(at).remove(0);
    assert!((1..=60).contains(&entry.seconds), "{entry:?}");
    while let Some(next) = ledger.wake_at() {
        at = next;
        ledger.tick(at);
        for entry in ledger.next_changes(at) {
            assert!(
                (1..=30).contains(&entry.seconds),
                "0 would give it away: {entry:?}"
            );
            assert!(!entry.gives_back);
            ledger.changed(at, at, &entry, Answer::Done);
        }
    }
    assert_eq!(ledger.take_lost(), [Receipt(1)]);
    assert!(at <= now + LONGEST_HOLD && at > now + LONGEST_HOLD - seconds(2));
}

#[test]
fn a_message_with_several_events_is_told_of_once_when_all_have_a_verdict() {
    let now = Instant::now();
    let three = |name: &str| Arrival {
        events: vec![RawEvent::default(); 3],
        ..arrivals(&[name]).remove(0)
    };
    let mut ledger = Ledger::new(VISIBILITY);
    ledger.arrived(now, vec![three("x"), three("y")]);
    let mut deliveries = ledger.hand_out(5);
    for _ in 0..2 {
        ledger.settle(now, vec![deliveries.remove(0).ack()]);
        assert_eq!(deletions(&mut ledger), Vec::<String>::new());
    }
    ledger.settle(now, vec![deliveries.remove(0).ack()]);
    assert_eq!(deletions(&mut ledger), ["x"]);

    let (first, second) = (deliveries.remove(0), deliveries.remove(0));
    ledger.settle(now, vec![first.release(Some(seconds(3))), second.ack()]);
    assert_eq!(changes(&mut ledger, now), [], "the third is not handed out yet");
    ledger.give_back_waiting(now);
    assert_eq!(changes(&mut ledger, now), [of("y", 3)], "the longest delay holds");
}

#[test]
fn a_message_without_events_is_deleted() {
    let now = Instant::now();
    let mut ledger = Ledger::new(VISIBILITY);
    let arrival = arrivals(&["x"]).remove(0);
    ledger.arrived(
        now,
        vec![Arrival {
            events: vec![],
            ..arrival
        }],
    );
    assert_eq!(deletions(&mut ledger), ["x"]);
}

#[derive(Debug, Clone)]
enum Step {
    Arrive(u8),
    HandOut(usize),
    Ack(usize),
    Release(usize, u64),
    Pass(u64),
    /// Which calls are answered and how.
    Answer(Vec<u8>),
    GiveBack,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1_u8..8).prop_map(Step::Arrive),
        3 => (1_usize..6).prop_map(Step::HandOut),
        5 => any::<usize>().prop_map(Step::Ack),
        2 => (any::<usize>(), 0_u64..5).prop_map(|(at, after)| Step::Release(at, after)),
        3 => (0_u64..12).prop_map(Step::Pass),
        4 => prop::collection::vec(0_u8..8, 0..12).prop_map(Step::Answer),
        1 => Just(Step::GiveBack),
    ];
    prop::collection::vec(step, 0..150)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    /// Whatever happens: only what was acked is deleted; each message has one call at a time; what
    /// is handed out is settled or reported as lost, once; nothing is handed out after one of its
    /// group was lost or released; and in the end nothing is left.
    #[test]
    fn nothing_is_deleted_unasked_or_kept_for_ever(steps in steps()) {
        let start = Instant::now();
        let mut now = start;
        let mut ledger = Ledger::new(VISIBILITY);
        let (mut sent, mut held): (u64, Vec<Delivery>) = (0, Vec::new());
        let mut acked: HashSet<u64> = HashSet::new();
        let mut calls: Vec<(bool, Instant, Entry)> = Vec::new();
        let mut named: HashMap<Receipt, u64> = HashMap::new();
        let mut next_named = 0_u64;
        for step in steps {
            match step {
                Step::Arrive(count) => {
                    let names: Vec<String> = (0..count).map(|_| {
                        sent += 1;
                        format!("{}{sent}", ["a", "b", "c"][(sent % 3) as usize])
                    }).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    ledger.arrived(now, arrivals(&names));
                }
                Step::HandOut(max) => {
                    ledger.tick(now);
                    for delivery in ledger.hand_out(max) {
                        let number = delivery.receipt.0;
                        prop_assert!(number > next_named, "receipts grow");
                        next_named = number;
                        named.insert(delivery.receipt, number);
                        held.push(delivery);
                    }
                }
                Step::Ack(at) if !held.is_empty() => {
                    let delivery = held.remove(at % held.len());
                    if ledger.outstanding.contains_key(&delivery.receipt) {
                        acked.insert(named[&delivery.receipt]);
                    }
                    ledger.settle(now, vec![delivery.ack()]);
                }
                Step::Release(at, after) if !held.is_empty() => {
                    let delivery = held.remove(at % held.len());
                    ledger.settle(now, vec![delivery.release(Some(seconds(after)))]);
                }
                Step::Ack(_) | Step::Release(..) => {}
                Step::Pass(time) => now += seconds(time),
                Step::Answer(how) => for answer in how {
                    if calls.is_empty() { break; }
                    let (deletes, at, entry) = calls.remove(usize::from(answer) % calls.len());
                    let answer = match answer { 0 => Answer::Gone, 1 | 2 => Answer::Again, _ => Answer::Done };
                    if deletes {
                        ledger.deleted(now, entry.number, answer);
                    } else {
                        ledger.changed(now, at, &entry, answer);
                    }
                },
                Step::GiveBack => ledger.give_back_waiting(now),
            }
            ledger.tick(now);
            for receipt in ledger.take_lost() {
                let at = held.iter().position(|delivery| delivery.receipt == receipt);
                prop_assert!(at.is_some(), "{receipt:?} is lost, and nobody had it");
                drop(held.remove(at.unwrap()));
            }
            prop_assert_eq!(held.len(), ledger.outstanding());
            let deletions = ledger.next_deletions();
            let changes = ledger.next_changes(now);
            prop_assert!(deletions.len() <= BATCH && changes.len() <= BATCH);
            for (deletes, entry) in deletions.into_iter().map(|e| (true, e)).chain(changes.into_iter().map(|e| (false, e))) {
                prop_assert!(!calls.iter().any(|(_, _, other)| other.number == entry.number && ledger.messages.contains_key(&entry.number)), "two calls about one message");
                // One event a message: their numbers are the same.
                prop_assert!(!deletes || acked.contains(&entry.number), "deleted, though not acked");
                calls.push((deletes, now, entry));
            }
            for message in ledger.messages.values() {
                prop_assert!(message.calling || message.look_at > now, "nobody will look at it again");
            }
        }
        // No answer to anything any more: all of it runs out by itself, but for deletions under way.
        now += LONGEST_HOLD;
        ledger.tick(now);
        for (deletes, _, entry) in calls {
            if deletes {
                ledger.deleted(now, entry.number, Answer::Again);
            }
        }
        ledger.tick(now);
        prop_assert!(ledger.is_empty() && ledger.outstanding() == 0 && ledger.waiting() == 0);
    }
}
