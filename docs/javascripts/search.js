// A pasted message is a search for its words. The search has a syntax of its own, in which "-word"
// excludes the pages with that word, and "word:" is a field: "--batch is 3: use a multiple of 2"
// would find nothing. Hyphens before words are removed from what is typed, too.
document.addEventListener(
  "input",
  (event) => {
    const field = event.target;
    if (!field.matches("[data-md-component=search-query]")) return;
    let words = field.value.replace(/(^|\s)-+(?=[^\s-])/g, "$1");
    if (event.inputType === "insertFromPaste") {
      words = words.replace(/[\s:*~^+\-_,.=()[\]/'"]+/g, " ").trim();
    }
    if (words !== field.value) field.value = words;
  },
  true, // before the search reads the field
);
