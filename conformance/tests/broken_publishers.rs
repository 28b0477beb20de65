//! The suite rejects publishers that are broken on purpose, each by the promise that names its fault.

#[path = "support/publisher.rs"]
mod publisher;

use onlyonce_conformance::{block_on, publisher as suite};
use publisher::{Fault, MemoryDestination};

/// `fault => promise: words that its message has`.
macro_rules! rejected {
    ($($test:ident: $fault:ident => $promise:ident, $says:literal;)+) => {
        $(
            #[test]
            fn $test() {
                let harness = MemoryDestination::with(Fault::$fault);
                let broken = block_on(suite::$promise(&harness)).expect_err("it passes");
                assert_eq!(broken.promise(), stringify!($promise));
                assert!(broken.to_string().contains($says), "{broken}");
            }
        )+
    };
}

rejected! {
    one_that_confirms_before_the_broker: ConfirmsBeforeTheBroker => confirmed_is_readable, "cannot be read";
    one_that_loses_on_stop: LosesOnStop => stop_flushes, "cannot be read";
    one_that_drops_those_who_wait_at_stop: DropsThoseWhoWaitAtStop => stop_flushes, "0 of 200";
    one_that_publishes_after_its_stop: PublishesAfterStop => stop_flushes, "that is stopped confirmed";
    one_that_names_events_anew: NamesEventsAnew => identity_arrives, "cannot be read";
    one_that_lets_headers_win: LetsHeadersWin => identity_arrives, "forged headers";
    one_that_drops_replays: DropsReplays => identity_arrives, "a replay is to be sent";
    one_that_makes_null_empty: MakesNullEmpty => bytes_arrive, "of tombstone the body was sent as null";
    one_that_makes_bodies_text: MakesBodiesText => bytes_arrive, "of binary the body was sent";
    one_that_loses_headers: LosesHeaders => bytes_arrive, "the headers were sent";
    one_that_confirms_the_missing: ConfirmsTheMissing => refusals_are_reported, "was confirmed";
    one_that_confirms_the_unroutable: ConfirmsTheUnroutable => refusals_are_reported, "(Refused) was confirmed";
    one_that_blames_the_message: BlamesTheMessage => refusals_are_reported, "Destination was due";
    one_that_loses_under_load: LosesUnderLoad => many_at_once, "cannot be read";
    one_that_refuses_under_load: RefusesUnderLoad => many_at_once, "as one of 1000 at once";
    one_whose_bad_message_costs_all: OneBadCostsAll => one_bad_message_costs_itself, "was good";
    one_that_confirms_while_the_broker_is_away: ConfirmsWhileAway => outages_end, "was confirmed while";
    one_that_never_recovers: NeverRecovers => outages_end, "still says";
    one_that_hides_outages: HidesOutages => outages_end, "the broker is away, and";
    one_that_hangs_in_silence: HangsInSilence => silence_is_bounded, "gave no answer";
    one_that_tells_secrets: TellsSecrets => secrets_stay_secret, "a secret is told";
    one_that_names_another_system: NamesAnotherSystem => says_who_it_is, "was due";
}
