//! How the models are checked: every interleaving is tried. Either all promises hold, or the one that a mistake breaks
//! is found. Included by `mod checking;` in each of them.

use stateright::{Checker, HasDiscoveries, Model};
use std::fmt::Debug;
use std::hash::Hash;

#[track_caller]
pub fn assert_holds<M>(model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

/// The checker finds that `property` does not hold.
#[track_caller]
pub fn assert_breaks<M>(property: &'static str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq,
{
    let found = HasDiscoveries::AllOf([property].into());
    let checker = model.checker().threads(2).finish_when(found).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_any_discovery(property);
    let steps = checker.discovery(property).map(|path| path.into_actions());
    println!("{property}: broken by {steps:?}");
}
