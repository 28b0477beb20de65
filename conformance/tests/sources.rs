//! The core's own sources keep their promises.

mod support;

mod memory {
    onlyonce_conformance::source_suite!(crate::support::Memory);
}

mod inbox_on_sqlite {
    onlyonce_conformance::source_suite!(crate::support::Held<onlyonce_conformance::Sqlite>);
}

mod inbox_on_postgres {
    onlyonce_conformance::source_suite!(crate::support::Held<crate::support::Postgres>);
}
