//! Mistakes that the compiler has to refuse.

#[test]
#[cfg(all(feature = "postgres", feature = "sqlite"))]
fn what_must_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
