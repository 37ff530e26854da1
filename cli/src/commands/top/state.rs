//! What the keys have chosen. Pure.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::lists::{List, SORTED_BY};

/// What becomes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// The view ends.
    Quit,
    /// The screen is drawn anew.
    Redraw,
    /// The key means nothing.
    Nothing,
}

/// What is chosen for one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The column it is sorted by.
    pub column: usize,
    /// The other way round.
    pub reversed: bool,
    /// How many rows are scrolled away.
    pub scrolled: usize,
}

/// What is chosen for the screen.
#[derive(Clone, Debug)]
pub struct State {
    /// The list with the most room, which the keys are for.
    pub focus: usize,
    /// For each list.
    pub choices: [Choice; 3],
}

/// A page.
const PAGE_ROWS: usize = 10;
/// Topics.
const FIRST_FOCUS: usize = 1;

impl Default for State {
    fn default() -> Self {
        Self {
            focus: FIRST_FOCUS,
            choices: SORTED_BY.map(|column| Choice {
                column,
                reversed: false,
                scrolled: 0,
            }),
        }
    }
}

impl State {
    /// Takes a key. `lists` are those on the screen.
    pub fn key(&mut self, key: KeyEvent, lists: &[List; 3]) -> Reaction {
        if key.kind == KeyEventKind::Release {
            return Reaction::Nothing;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let (Some(choice), Some(list)) = (self.choices.get_mut(self.focus), lists.get(self.focus))
        else {
            return Reaction::Nothing;
        };
        let last = list.rows.len().saturating_sub(1);
        match key.code {
            // Raw mode: the terminal makes no signal of it.
            KeyCode::Char('c') if control => return Reaction::Quit,
            KeyCode::Char('q') | KeyCode::Esc => return Reaction::Quit,
            KeyCode::Tab => self.focus = (self.focus + 1) % lists.len(),
            KeyCode::BackTab => self.focus = (self.focus + lists.len() - 1) % lists.len(),
            KeyCode::Char('s') => choice.column = (choice.column + 1) % list.columns.len().max(1),
            KeyCode::Char('r') => choice.reversed = !choice.reversed,
            KeyCode::Down | KeyCode::Char('j') => choice.scrolled = (choice.scrolled + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => choice.scrolled = choice.scrolled.saturating_sub(1),
            KeyCode::PageDown => choice.scrolled = (choice.scrolled + PAGE_ROWS).min(last),
            KeyCode::PageUp => choice.scrolled = choice.scrolled.saturating_sub(PAGE_ROWS),
            KeyCode::Home => choice.scrolled = 0,
            KeyCode::End => choice.scrolled = last,
            _ => return Reaction::Nothing,
        }
        Reaction::Redraw
    }
}

#[cfg(test)]
mod tests {
    use super::super::picture::{Picture, TopicRow};
    use super::*;

    fn lists(topics: usize) -> [List; 3] {
        let topic = |number: usize| TopicRow {
            name: format!("t{number}"),
            partitions: 1,
            leaderless: 0,
            records: None,
            in_per_s: None,
            out_per_s: None,
        };
        List::all(&Picture {
            topics: (0..topics).map(topic).collect(),
            ..Picture::default()
        })
    }

    fn press(state: &mut State, lists: &[List; 3], codes: &[KeyCode]) -> Reaction {
        let keys = codes
            .iter()
            .map(|code| KeyEvent::new(*code, KeyModifiers::NONE));
        keys.map(|key| state.key(key, lists)).last().unwrap()
    }

    #[test]
    fn keys_that_quit_do() {
        let (mut state, lists) = (State::default(), lists(0));
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert_eq!(press(&mut state, &lists, &[code]), Reaction::Quit);
        }
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.key(interrupt, &lists), Reaction::Quit);
        let reaction = press(&mut state, &lists, &[KeyCode::Char('c')]);
        assert_eq!(reaction, Reaction::Nothing);
    }

    #[test]
    fn tab_goes_round_the_lists_either_way() {
        let (mut state, lists) = (State::default(), lists(0));
        let mut seen = vec![state.focus];
        for _ in 0..3 {
            press(&mut state, &lists, &[KeyCode::Tab]);
            seen.push(state.focus);
        }
        assert_eq!(seen, [1, 2, 0, 1]);
        press(&mut state, &lists, &[KeyCode::BackTab, KeyCode::BackTab]);
        assert_eq!(state.focus, 2);
    }

    #[test]
    fn sorting_goes_round_the_columns_of_the_list_in_focus() {
        let (mut state, lists) = (State::default(), lists(0));
        let columns = lists[1].columns.len();
        let before = state.clone();
        press(
            &mut state,
            &lists,
            &[KeyCode::Char('s'), KeyCode::Char('r')],
        );
        assert_eq!(
            state.choices[1].column,
            (before.choices[1].column + 1) % columns
        );
        assert!(state.choices[1].reversed);
        assert_eq!(state.choices[0], before.choices[0]);
        press(&mut state, &lists, &vec![KeyCode::Char('s'); columns - 1]);
        assert_eq!(state.choices[1].column, before.choices[1].column);
    }

    #[test]
    fn scrolling_stays_within_the_list() {
        let (mut state, lists) = (State::default(), lists(15));
        press(&mut state, &lists, &[KeyCode::Up]);
        assert_eq!(state.choices[1].scrolled, 0);
        press(&mut state, &lists, &[KeyCode::PageDown, KeyCode::Down]);
        assert_eq!(state.choices[1].scrolled, 11);
        press(&mut state, &lists, &[KeyCode::PageDown, KeyCode::End]);
        assert_eq!(state.choices[1].scrolled, 14);
        press(&mut state, &lists, &[KeyCode::Home]);
        assert_eq!(state.choices[1].scrolled, 0);
    }
}
