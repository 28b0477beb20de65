//! The short form of the run; the full one is `scripts/chaos e2e`.
#![allow(clippy::print_stdout)]

use std::process::Command;

#[test]
fn payments_are_captured_and_booked_once_by_processes_that_are_killed() {
    for name in [
        "ONLYONCE_POSTGRES_URL",
        "ONLYONCE_RABBITMQ_URL",
        "ONLYONCE_KAFKA_BROKERS",
    ] {
        if std::env::var(name).is_err() {
            let required = std::env::var("ONLYONCE_REQUIRE_SERVICES").is_ok();
            assert!(!required, "{name} is not set");
            println!("skipped: {name} is not set (eval \"$(scripts/services env)\")");
            return;
        }
    }
    let run = Command::new(env!("CARGO_BIN_EXE_onlyonce-e2e"))
        .arg("--short")
        .env("CHAOS_LOGS", env!("CARGO_TARGET_TMPDIR"))
        .output();
    let run = run.expect("the program starts");
    let said = String::from_utf8_lossy(&run.stdout);
    println!("{said}");
    assert!(
        run.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&run.stderr)
    );
}
